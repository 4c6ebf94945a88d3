"""Questions about the cache, and their answers: part of `kvmanager.protocol`, from where it is to be
imported.

Every answer names the manager's start and the number of the last event of the cache that it knows of (`At`).
Whatever can be large is asked for in pages, so that no question holds up the manager for more than 2 ms.

`tenant` limits a question or command to what was made under that tenant's key; empty sees all. Whatever
others do, a tenant is told the same: events have numbers of its own (`At`), and so have blocks, made of their
content (`own_number`), with generation 0.
"""

from array import array
from collections.abc import Sequence
from typing import Literal

from kvmanager.messages.sampling_params import Message
from kvmanager.messages.steps import BlockRef as BlockRef

MAX_PAGE = 2048  # blocks, events or requests of one answer


NO_NUMBER = -1  # a tenant's block without content


def own_number(block_hash: bytes) -> int:
    """The number by which a tenant knows its block: 48 bits, as long as numbers in JSON are exact."""
    return int.from_bytes(block_hash[:6], "big") if block_hash else NO_NUMBER


def own_numbers(hashes: Sequence[bytes]) -> list[int]:
    """The same for many at once."""
    if not all(hashes):
        return [own_number(digest) for digest in hashes]
    words = array("Q", b"".join(hashes))
    words.byteswap()
    return [word >> 16 for word in words[::4]]  # the first of each one's 32 bytes


class At(Message, frozen=True):
    """Which state an answer describes: that after event number `sequence` of the start `boot_id`. A tenant's
    events are those of its own content, counted from its first question on.
    """

    boot_id: str
    sequence: int


# --- what would hit, and why not ----------------------------------------------------------------------------


MAX_PART = 2048  # tokens of one message


class TextPart(Message, frozen=True, tag=True):
    """The tokens with which the text of the question or command `query_id` begins, which comes later and has
    the rest: at least one, and few, as it has the work of the answer. A text of more than MAX_PART comes so,
    all parts in order; `start` is how many of its tokens have come before. There is no answer, and none to a
    question of whose parts the manager has dropped one, as too many were asked at once.
    """

    query_id: int
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    tenant: str = ""
    start: int = 0


class ExplainQuery(Message, frozen=True, tag=True):
    """What would a request with these tokens find?"""

    query_id: int
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    tenant: str = ""
    start: int = 0  # as of TextPart


Cause = Literal["capacity", "evict", "clear", "damaged", "other_layout"]
"""Why something is no longer found: its room was needed, a command, a copy that could not be read back, or a
pool of another layout was emptied.
"""


class Eviction(Message, frozen=True):
    """The end of a cached block. `request_id` is empty where no request needed the room."""

    seconds_ago: float
    cause: Cause
    request_id: str = ""


class Sibling(Message, frozen=True):
    """The cached block that begins most like the text, where the text leaves what is cached."""

    block: BlockRef
    token_ids: tuple[int, ...]
    num_shared: int  # tokens, of the block's first ones


class Explanation(Message, frozen=True, tag=True):
    """Answer to ExplainQuery. A Submit of the same tokens at the same state finds `num_cached_tokens`.

    `reason` is why the hit ends where it ends; "hit" if nothing but the last token is left to compute.
    """

    query_id: int
    at: At
    num_tokens: int
    num_cached_tokens: int  # those of `blocks`, then `num_shared` of `sibling`; what comes from the tier too
    block_size: int
    blocks: tuple[BlockRef, ...]  # full blocks in the pool, in order
    tier_blocks: int  # blocks after those of the pool that the tier holds
    reason: Literal["hit", "never_seen", "evicted", "partial", "being_computed", "other_layout"]
    sibling: Sibling | None = None
    eviction: Eviction | None = None
    computed_by: str = ""  # request_id of who computes the next block now
    more_blocks: int = 0  # in the pool after `blocks`, of which no more than MAX_PAGE are named


class PlanQuery(Message, frozen=True, tag=True):
    """What would admission do with such a request now? Changes nothing."""

    query_id: int
    token_ids: tuple[int, ...]
    max_tokens: int
    num_choices: int = 1
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    start: int = 0  # as of TextPart


Outcome = Literal["start", "wait_for_turn", "wait_for_prefix", "wait_for_tier", "wait_for_room", "refuse"]


class PlanAnswer(Message, frozen=True, tag=True):
    """Answer to PlanQuery. `outcome` is what would happen first; `message` says it in words, with numbers."""

    query_id: int
    at: At
    outcome: Outcome
    message: str
    runner: str = ""  # who would run it
    reuse: tuple[BlockRef, ...] = ()
    copy_from: BlockRef | None = None
    num_copied_tokens: int = 0
    num_cached_tokens: int = 0
    promote: int = 0  # blocks that would come from the tier
    allocate: int = 0  # fresh blocks at the start
    allocate_at_most: int = 0  # fresh blocks until its end, at its longest
    evict: tuple[BlockRef, ...] = ()  # cached blocks that would make room at the start, in order
    preempt: tuple[str, ...] = ()  # request_ids that would have to make room
    waits_for: str = ""  # request_id that computes its prefix
    ahead: int = 0  # requests that wait before it
    more_reused: int = 0  # blocks after `reuse`, of which no more than MAX_PAGE are named


# --- what is held -------------------------------------------------------------------------------------------


class BlocksQuery(Message, frozen=True, tag=True):
    """Blocks `first` to `first + limit`, with or without what they hold; or slots of the tier, as if they
    were blocks. A page may be shorter than asked for: the next one begins at its end.
    """

    query_id: int
    first: int = 0
    limit: int = MAX_PAGE
    content: bool = False
    tenant: str = ""
    tier: Literal["pool", "disk"] = "pool"


class BlocksPage(Message, frozen=True, tag=True):
    """Answer to BlocksQuery: columns of equal length, one entry per block from `first` on.

    A block of another tenant has flag OTHER, and zeros and blanks everywhere else.
    """

    query_id: int
    at: At
    num_blocks: int  # of the pool
    block_size: int
    block_bytes: int
    first: int
    states: bytes  # FREE, RESERVED, SEALED, CACHED, QUARANTINED as 0 to 4
    ref_counts: bytes  # at most 255
    num_tokens: tuple[int, ...]  # 0 unless sealed or cached
    ages: tuple[float, ...]  # seconds since it was sealed; 0 unless sealed or cached
    flags: bytes  # FLAG_… or-ed
    generations: tuple[int, ...] = ()  # from here on only with `content`
    hashes: tuple[bytes, ...] = ()  # empty where nothing is found: also after a forced Clear
    parents: tuple[bytes, ...] = ()
    tokens: tuple[bytes, ...] = ()  # packed, 4 bytes each, little-endian
    salts: tuple[bytes, ...] = ()
    hits: tuple[int, ...] = ()  # times that a request reused it
    root: bytes = b""  # the parent of every first block


FLAG_PINNED = 1
FLAG_IN_TIER = 2
FLAG_PARTIAL = 4
FLAG_OTHER = 8


class BlockQuery(Message, frozen=True, tag=True):
    """By number, or, if `block_hash` is given, by content: as a tenant does."""

    query_id: int
    block_id: int = -1
    tenant: str = ""
    block_hash: bytes = b""


class HolderInfo(Message, frozen=True):
    """Someone who keeps blocks in use."""

    kind: Literal["sequence", "credits", "pin", "quarantine", "copy"]
    name: str  # of the request, runner, pin or lock
    client: str  # name of the process behind it; empty for pins and copies
    blocks: int
    choice: int = 0
    seconds_silent: float = 0.0  # of the runner behind it
    stuck: bool = False


class BlockDetail(Message, frozen=True, tag=True):
    """Answer to BlockQuery; `state` is empty where there is no such block, or it is another tenant's."""

    query_id: int
    at: At
    block: BlockRef = (0, 0)
    state: str = ""
    ref_count: int = 0
    holders: tuple[HolderInfo, ...] = ()
    block_hash: str = ""  # hex
    parent_hash: str = ""
    parent_block: int = -1
    first_token: int = 0  # index of its first token in its text; -1 if a parent is gone
    token_ids: tuple[int, ...] = ()
    age: float = 0.0
    hits: int = 0
    copies: tuple[int, ...] = ()  # other blocks with the same content
    children: int = 0
    pins: tuple[str, ...] = ()
    in_tier: bool = False
    eviction_rank: int = -1  # how many are evicted before it; -1 if in use, or further away than is counted


class HoldersQuery(Message, frozen=True, tag=True):
    query_id: int
    tenant: str = ""


class ProcessInfo(Message, frozen=True):
    """A process that is registered, or whose blocks are quarantined."""

    kind: Literal["frontend", "runner", "quarantine"]
    name: str
    client_id: int
    requests: int
    sequences: int
    blocks: int
    credits: int
    ready: bool
    draining: bool
    stuck: bool
    seconds_silent: float


class HoldersAnswer(Message, frozen=True, tag=True):
    """Answer to HoldersQuery; the holders with the most blocks first, at most MAX_PAGE."""

    query_id: int
    at: At
    processes: tuple[ProcessInfo, ...]
    holders: tuple[HolderInfo, ...]
    num_holders: int


# --- requests -----------------------------------------------------------------------------------------------


class RequestsQuery(Message, frozen=True, tag=True):
    """Requests that are live, or ended lately; `request_id` asks for one, and then with its block tables."""

    query_id: int
    request_id: str = ""
    tenant: str = ""
    cursor: str = ""
    limit: int = 256


class SequenceInfo(Message, frozen=True):
    choice: int
    num_tokens: int  # that the manager knows of
    num_computed: int  # tokens whose KV is in its blocks, as last reported
    num_blocks: int
    shared_blocks: int  # that it holds together with others
    block_table: tuple[BlockRef, ...] = ()


class Lookup(Message, frozen=True):
    """What the last lookup of a request found."""

    num_tokens: int
    hit_blocks: int
    copied_tokens: int
    promoted_blocks: int
    waited_for: str = ""  # request_id that computed its prefix
    waited_seconds: float = 0.0


RequestKind = Literal[
    "waiting", "waiting_for_prefix", "waiting_for_tier", "running", "preempting", "cancelling", "ended"
]


class RequestInfo(Message, frozen=True):
    request_id: str
    frontend: str
    state: RequestKind
    priority: int
    age: float  # seconds since it arrived
    attempt: int
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    preemptions: int
    runner: str = ""
    lookup: Lookup | None = None
    sequences: tuple[SequenceInfo, ...] = ()


class RequestsPage(Message, frozen=True, tag=True):
    """Answer to RequestsQuery; `next_cursor` is empty at the end."""

    query_id: int
    at: At
    requests: tuple[RequestInfo, ...]
    next_cursor: str = ""


# --- audit --------------------------------------------------------------------------------------------------


class AuditQuery(Message, frozen=True, tag=True):
    """Check the invariants of blocks `first` to `first + limit`, and those that take no loop over blocks."""

    query_id: int
    first: int = 0
    limit: int = 512


class AuditPage(Message, frozen=True, tag=True):
    query_id: int
    at: At
    num_blocks: int
    checked: int
    faults: tuple[str, ...]
