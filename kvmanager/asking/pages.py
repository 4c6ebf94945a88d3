"""What the cache holds, in pages: columns over blocks or slots of the tier, and the events of the ring.

A page is made of slices and comprehensions over the pool's lists, so that its time is bounded by its length
alone, whatever the pool's size is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.asking.event_log import EventLog, OwnEvents
from kvmanager.pool.block_pool import CACHED, FREE, BlockPool
from kvmanager.pool.hashing import NO_HASH, NO_SALT, TOKEN_BYTES, tenant_bytes
from kvmanager.protocol import (
    FLAG_IN_TIER,
    FLAG_OTHER,
    FLAG_PARTIAL,
    FLAG_PINNED,
    MAX_PAGE,
    At,
    BlocksPage,
    BlocksQuery,
    EventsPage,
    EventsQuery,
)
from kvmanager.state import State

MAX_CONTENT = 1024  # blocks of a page with content, or for a tenant


@dataclass(slots=True)
class Columns:
    """One entry per block, as in BlocksPage."""

    states: bytearray
    ref_counts: bytearray
    num_tokens: list[int]
    ages: list[float]
    flags: bytearray
    generations: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    salts: list[bytes] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    def hide(self, places: Sequence[int]) -> None:
        """Another tenant's: nothing is said of these but that."""
        numbers = (self.states, self.ref_counts, self.num_tokens, self.ages, self.generations, self.hits)
        for number_column in numbers:
            for place in places if number_column else ():
                number_column[place] = 0
        for column in (self.hashes, self.parents, self.tokens, self.salts):
            for place in places if column else ():
                column[place] = b""
        for place in places:
            self.flags[place] = FLAG_OTHER

    def page(self, query: BlocksQuery, at: At, pool: BlockPool, first: int, num_blocks: int) -> BlocksPage:
        return BlocksPage(
            query.query_id,
            at,
            num_blocks,
            pool.block_size,
            pool.layout.block_bytes,
            first,
            bytes(self.states),
            bytes(self.ref_counts),
            tuple(self.num_tokens),
            tuple(self.ages),
            bytes(self.flags),
            tuple(self.generations),
            tuple(self.hashes),
            tuple(self.parents),
            tuple(self.tokens),
            tuple(self.salts),
            tuple(self.hits),
            pool.root,
        )


def blocks_page(state: State, query: BlocksQuery, now: float) -> BlocksPage:
    """`first` beyond the end gives an empty page. One with content is shorter than MAX_PAGE."""
    pool, at = state.pool, state.at(query.tenant)
    if pool is None:
        return BlocksPage(query.query_id, at, 0, 0, 0, 0, b"", b"", (), (), b"")
    tier = state.tiering.tier if state.tiering is not None else None
    total = pool.num_blocks if query.tier == "pool" else tier.num_slots if tier is not None else 0
    first = min(max(query.first, 0), total)
    longest = MAX_CONTENT if query.content or query.tenant else MAX_PAGE
    end = min(first + min(max(query.limit, 1), longest), total)
    if query.tier == "pool":
        columns = pool_columns(state, pool, query, first, end, now)
    else:
        columns = tier_columns(state, query, first, end)
    return columns.page(query, at, pool, first, total)


def pool_columns(
    state: State, pool: BlockPool, query: BlocksQuery, first: int, end: int, now: float
) -> Columns:
    columns_of = zip(*pool.contents[first:end], strict=True)
    hashes, parents, salts, tokens = map(list, columns_of) if end > first else ([], [], [], [])
    pinned, full = state.pins.uses, pool.block_bytes
    kept = state.tiering.tier.contents_by_hash() if state.tiering is not None else {}
    columns = Columns(
        bytearray(pool.state[first:end]),
        pool.ledger.ref_counts(first, end),
        [len(packed) // TOKEN_BYTES for packed in tokens],
        [
            now - sealed_at if packed else 0.0
            for sealed_at, packed in zip(pool.sealed_at[first:end], tokens, strict=True)
        ],
        bytearray(
            [
                (block in pinned) * FLAG_PINNED
                | (digest in kept) * FLAG_IN_TIER
                | (0 < len(packed) < full) * FLAG_PARTIAL
                for block, digest, packed in zip(range(first, end), hashes, tokens, strict=True)
            ]
        ),
    )
    if query.content:
        columns.generations = pool.generation[first:end]
        columns.hashes = hashes
        columns.tokens = tokens
        columns.parents = parents
        columns.salts = salts
        columns.hits = [h if packed else 0 for h, packed in zip(pool.hits[first:end], tokens, strict=True)]
        for block in pool.unfound.intersection(range(first, end)) if pool.unfound else ():
            columns.hashes[block - first] = NO_HASH
    if query.tenant:
        columns.hide(foreign_blocks(state, pool, query.tenant, first, end))
    return columns


def foreign_blocks(state: State, pool: BlockPool, tenant: str, first: int, end: int) -> list[int]:
    """Places on the page of blocks that are neither free nor the tenant's."""
    prefix = tenant_bytes(tenant)
    own = {block for each in state.sequences(tenant) for block in each.table[each.num_sealed :]}
    return [
        place
        for place, (kind, (_, _, salt, packed)) in enumerate(
            zip(pool.state[first:end], pool.contents[first:end], strict=True)
        )
        if kind != FREE and not (salt.startswith(prefix) if packed else first + place in own)
    ]


def tier_columns(state: State, query: BlocksQuery, first: int, end: int) -> Columns:
    """Slots as if they were blocks: CACHED where one has content, else FREE."""
    assert state.tiering is not None or first == end
    contents = state.tiering.tier.slots(first, end) if state.tiering is not None else []
    shown = [
        content if content is not None and content.salt.startswith(tenant_bytes(query.tenant)) else None
        for content in contents
    ]
    columns = Columns(
        bytearray([FREE if content is None else CACHED for content in shown]),
        bytearray(len(shown)),
        [0 if content is None else len(content.tokens) // TOKEN_BYTES for content in shown],
        [0.0] * len(shown),
        bytearray([0 if content is None else FLAG_IN_TIER for content in shown]),
    )
    if query.content:
        columns.generations = columns.hits = [0] * len(shown)
        columns.hashes = [NO_HASH if content is None else content.block_hash for content in shown]
        columns.parents = [NO_HASH if content is None else content.parent_hash for content in shown]
        columns.tokens = [b"" if content is None else content.tokens for content in shown]
        columns.salts = [NO_SALT if content is None else content.salt for content in shown]
    hidden = [place for place, content in enumerate(contents) if content is not None and shown[place] is None]
    for place in hidden:
        columns.flags[place] = FLAG_OTHER
    return columns


def events_page(state: State, query: EventsQuery) -> EventsPage:
    """For a tenant: those of its own content, in numbers of its own."""
    every = state.pool.log if state.pool is not None else EventLog(1)
    log: EventLog | OwnEvents = every.own(tenant_bytes(query.tenant)) if query.tenant else every
    now_at = state.at(query.tenant)
    if query.boot_id != state.boot_id or not log.has(query.after):
        return EventsPage(query.query_id, now_at, (), gap=bool(query.boot_id))
    events = log.since(query.after, min(max(query.limit, 1), MAX_PAGE))
    last = events[-1].sequence if events else log.last
    return EventsPage(query.query_id, At(state.boot_id, last), tuple(events), more=last < now_at.sequence)
