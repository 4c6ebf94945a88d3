"""The bodies of the answers about figures, requests, holders and the audit: more of `answers`."""

import msgspec
from msgspec import UNSET, UnsetType

from services.kv.answers import Answer, BlockRef, HolderCard

# --- stats --------------------------------------------------------------------------------------------------


class PoolCard(msgspec.Struct):
    """Blocks by state; `waste` is the share of the slots in used blocks that holds no token, 0 to 1. A tenant
    is told of its own sealed and cached blocks, and null else.
    """

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int | None  # null before there is a pool
    free: int | None
    reserved: int | None
    sealed: int
    cached: int
    quarantined: int | None
    used_tokens: int | None
    waste: float | None


class CacheCard(msgspec.Struct):
    """Tokens looked up and found, since the manager's start."""

    queries: int
    hits: int
    hit_rate: float | None  # null before the first query
    evictions: int
    prefix_waits: int


class RequestsCard(msgspec.Struct):
    """A tenant is told how many of its own are running and waiting, and no more."""

    running: int
    waiting: int
    preemptions: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET
    rejected: int | UnsetType = UNSET


class TierCard(msgspec.Struct):
    """The disk tier; `num_slots` is 0 where there is none."""

    num_slots: int
    blocks: int
    bytes: int
    demotions: int
    promotions: int
    failures: int


class PinsCard(msgspec.Struct):
    blocks: int
    budget_blocks: int


class RunnerCard(msgspec.Struct):
    name: str
    client_id: int
    ready: bool
    draining: bool
    stuck: bool
    running: int  # sequences
    credits: int  # blocks
    last_report_age: float


class StatsAnswer(Answer, kw_only=True):
    """GET /kv/stats. What is not the tenant's own is absent for a tenant, or null."""

    pool: PoolCard
    requests: RequestsCard
    pins: PinsCard
    cache: CacheCard | UnsetType = UNSET
    tier: TierCard | UnsetType = UNSET
    runners: list[RunnerCard] | UnsetType = UNSET
    dropped_messages: int | UnsetType = UNSET


# --- requests and holders -----------------------------------------------------------------------------------


class SequenceCard(msgspec.Struct):
    choice: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    shared_blocks: int
    block_table: list[BlockRef]


class LookupCard(msgspec.Struct):
    """What its last lookup found."""

    num_tokens: int
    hit_blocks: int
    copied_tokens: int
    promoted_blocks: int
    waited_for: str
    waited_seconds: float


class RequestCard(msgspec.Struct):
    request_id: str
    frontend: str
    state: str
    priority: int
    age: float
    attempt: int
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    preemptions: int
    runner: str
    lookup: LookupCard | None
    sequences: list[SequenceCard]


class RequestsAnswer(Answer, kw_only=True):
    """GET /kv/requests. A page may be shorter than its limit; the end is where `next_cursor` is null."""

    requests: list[RequestCard]
    next_cursor: str | None


class RequestAnswer(Answer, kw_only=True):
    """GET /kv/requests/{id}: with block tables."""

    request: RequestCard


class ProcessCard(msgspec.Struct):
    kind: str
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


class HoldersAnswer(Answer, kw_only=True):
    """GET /kv/holders: those with the most blocks first; a tenant sees no processes."""

    processes: list[ProcessCard]
    holders: list[HolderCard]
    num_holders: int


class AuditAnswer(Answer, kw_only=True):
    """GET /kv/audit."""

    ok: bool
    checked: int
    num_blocks: int
    faults: list[str]
    seconds: float
