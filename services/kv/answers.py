"""The bodies of the answers of /kv/…, as msgspec Structs. Hashes and salts are hex; times are seconds.

`boot_id` and `sequence` say which state an answer describes: that after event number `sequence` (see
/kv/events) of the KV manager's start `boot_id`.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.errors import ErrorBody

State = Literal["", "FREE", "RESERVED", "SEALED", "CACHED", "QUARANTINED"]


class Answer(msgspec.Struct, kw_only=True):
    boot_id: str
    sequence: int


class BlockRef(msgspec.Struct):
    """A block in one of its lives. A tenant's has a number made of its content, -1 while it has none, and
    generation 0: so it is told the same whatever others do.
    """

    block: int
    generation: int


# --- blocks -------------------------------------------------------------------------------------------------


class MapAnswer(Answer, kw_only=True):
    """GET /kv/map: columns, one entry per block from `first` on. In `states` F is free, R reserved, S sealed,
    C cached, Q quarantined, X another tenant's. `flags` are or-ed: 1 pinned, 2 in the tier as well,
    4 partial, 8 another tenant's. `ages` count from when the block was sealed, in whole seconds from 10 on.

    A tenant's map is of its own content alone, in the order of its numbers: `blocks` has them.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    first: int
    next: int | None
    states: str
    ref_counts: list[int]  # at most 255
    num_tokens: list[int]
    ages: list[float]
    flags: list[int]
    blocks: list[int] | UnsetType = UNSET


class HolderCard(msgspec.Struct):
    """Someone who keeps blocks in use."""

    kind: str
    name: str
    client: str
    blocks: int
    choice: int
    seconds_silent: float
    stuck: bool


class BlockAnswer(Answer, kw_only=True):
    """GET /kv/blocks/{id}. `first_token` is the index of its first token in its text, null if that is not
    known; `eviction_rank` how many are evicted before it, null if it is in use, or further away than is
    counted.
    """

    block: int
    generation: int
    state: State
    ref_count: int
    holders: list[HolderCard]
    hash: str
    parent: str
    parent_block: int | None
    first_token: int | None
    num_tokens: int
    token_ids: list[int]
    text: str
    age: float
    hits: int
    copies: list[int]
    children: int
    pins: list[str]
    in_tier: bool
    eviction_rank: int | None


class SubtreeCard(msgspec.Struct, gc=False):
    """A node and all below it."""

    blocks: int
    tokens: int
    bytes: int
    hits: int


class NodeCard(msgspec.Struct):
    """A run of blocks without a branch. `hash` is that of its last block, `parent` that of the block before
    its first one (null at a root); `first_token` the index of its first token, null where a block before is
    gone. `references` are those of its most held block; `match`: it contains what was searched for. A tree's
    order is by `subtree`.
    """

    hash: str
    parent: str | None
    depth: int
    block: int  # its first one
    blocks: int
    tokens: int
    text: str
    first_token: int | None
    references: int
    hits: int
    bytes: int
    age: float
    partial: bool
    in_tier: bool
    pinned: bool
    salt: str
    subtree: SubtreeCard
    children: int
    match: bool


class PrefixesAnswer(Answer, kw_only=True):
    """GET /kv/prefixes: the tree, flattened: a node, then all below it. `total` counts the whole listing."""

    nodes: list[NodeCard]
    next_cursor: str | None
    total: int


# --- explain, plan ------------------------------------------------------------------------------------------


class ExplainedBlock(msgspec.Struct):
    """A block that would be reused; `block` is null for one that would come from the tier."""

    block: int | None
    generation: int | None
    tier: Literal["pool", "disk"]
    first_token: int
    num_tokens: int


class Side(msgspec.Struct):
    """What one of two texts has from the difference on, to the end of the block."""

    token_ids: list[int]
    text: str


class CachedSide(Side):
    block: int


class Difference(msgspec.Struct):
    """`token` is the index of the first token that is not cached; `before` is the text before it, on both
    sides; `shared_tokens` how many tokens of its block are the same.
    """

    token: int
    block_index: int
    offset_in_block: int
    shared_tokens: int
    before: str
    yours: Side
    cached: CachedSide


class EvictionCard(msgspec.Struct):
    seconds_ago: float
    cause: str
    request_id: str


class ExplainAnswer(Answer, kw_only=True):
    """POST /kv/explain."""

    num_tokens: int
    cached_tokens: int
    block_size: int
    reason: Literal["hit", "never_seen", "evicted", "partial", "being_computed", "other_layout"]
    blocks: list[ExplainedBlock]
    difference: Difference | None
    eviction: EvictionCard | None
    computed_by: str
    advice: str


class PlanCard(Answer, kw_only=True):
    """POST /kv/plan: what admission would do with such a request now."""

    num_tokens: int
    outcome: Literal["start", "wait_for_turn", "wait_for_prefix", "wait_for_tier", "wait_for_room", "refuse"]
    message: str
    runner: str
    reuse: list[BlockRef]
    copy_from: BlockRef | None
    copied_tokens: int
    cached_tokens: int
    promote: int
    allocate: int
    allocate_at_most: int
    evict: list[BlockRef]
    preempt: list[str]
    waits_for: str
    ahead: int


# --- control ------------------------------------------------------------------------------------------------


class WarmAnswer(Answer, kw_only=True):
    """POST /kv/warm."""

    tokens: int
    cached_tokens: int
    computed_tokens: int
    seconds: float


class WarmProgress(msgspec.Struct):
    computed_tokens: int
    tokens: int


class EvictAnswer(Answer, kw_only=True):
    """POST /kv/evict and /kv/clear: blocks."""

    evicted: int
    in_use: int


class ClearRefused(msgspec.Struct):
    """POST /kv/clear, 409."""

    error: ErrorBody
    in_use: int
    blockers: list[HolderCard]


class PinCard(msgspec.Struct):
    """One pin."""

    name: str
    blocks: int
    tokens: int
    expires_in: float  # seconds
    tenant: str | UnsetType = UNSET  # whose it is, told to an admin


class Nothing(msgspec.Struct):
    """It was done; there is nothing to say."""


class Ready(msgspec.Struct):
    status: Literal["ready"]


class PinList(msgspec.Struct):
    data: list[PinCard]
    pinned_blocks: int
    budget_blocks: int
    object: str = "list"


# --- events -------------------------------------------------------------------------------------------------


class SnapshotBlock(msgspec.Struct, gc=False):
    hash: str
    parent: str
    num_tokens: int
    block: int | None  # null in the tier
    tier: Literal["pool", "disk"]


class SnapshotEvent(Answer, kw_only=True):
    """A part of what is cached at `sequence`; the snapshot ends with the part that is the `last` one."""

    blocks: list[SnapshotBlock]
    last: bool


class CacheEventCard(Answer, kw_only=True):
    """What changed. `hash`, `tier` and so on are absent from "cleared", text and tokens from "removed"."""

    kind: Literal["stored", "removed", "cleared"]
    time: float  # Unix time
    tier: Literal["pool", "disk"] | UnsetType = UNSET
    hash: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    block: int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


class GapEvent(Answer, kw_only=True):
    """Events were lost; a snapshot follows. `after` is the last one that the client had."""

    after: int
