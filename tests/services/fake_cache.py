"""A naive cache that answers the questions of the introspection: for fake managers."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmanager.pool.hashing import block_hash, salt_digest, tenant_bytes, token_array
from kvmanager.protocol import (
    FLAG_OTHER,
    FLAG_PARTIAL,
    At,
    AuditPage,
    AuditQuery,
    BlockDetail,
    BlockQuery,
    BlocksPage,
    BlocksQuery,
    CacheEvent,
    Clear,
    Cleared,
    EventsPage,
    EventsQuery,
    Evict,
    ExplainQuery,
    Explanation,
    HolderInfo,
    HoldersAnswer,
    HoldersQuery,
    PlanAnswer,
    PlanQuery,
    ProcessInfo,
    RequestInfo,
    RequestsPage,
    RequestsQuery,
    SequenceInfo,
    Sibling,
    own_number,
)

BLOCK_SIZE = 16
BLOCK_BYTES = 4096
ROOT = b"r" * 32
FREE, CACHED = 0, 3


@dataclass(frozen=True)
class Block:
    """What a block holds; `salt` is as in `hashing.salt_digest`."""

    hash: bytes
    parent: bytes
    tokens: tuple[int, ...]
    salt: bytes
    hits: int = 0
    ref_count: int = 0
    age: float = 1.0


class FakeCache:
    """`blocks[i]` is None or what block i holds. What tests set: `requests`, `holders`, `blockers`, `page`
    (how many blocks an answer has at most), `before_page` (called before each page of blocks is read),
    `forget` (events up to this number are gone), `pick` (which free block is taken).
    """

    def __init__(self, num_blocks: int = 100) -> None:
        self.boot_id = "boot-0"
        self.blocks: list[Block | None] = [None] * num_blocks
        self.events: list[CacheEvent] = []
        self.forget = 0
        self.requests: list[RequestInfo] = []
        self.holders: list[HolderInfo] = []
        self.blockers: tuple[HolderInfo, ...] = ()
        self.faults: list[str] = []
        self.page = 2048
        self.pick: Callable[[list[int]], int] = min  # of the free ones
        self.before_page: Callable[[], object] = lambda: None
        self.questions: list[object] = []

    @property
    def at(self) -> At:
        return At(self.boot_id, len(self.events))

    # --- what happens to it -------------------------------------------------------------------------------

    def store(self, tokens: Sequence[int], cache_salt: str = "", tenant: str = "") -> list[int]:
        """All blocks of a text, a partial one at its end; those that are there already stay. Returns all."""
        found, parent, salt = [], ROOT, salt_digest(cache_salt, tenant)
        for start in range(0, len(tokens), BLOCK_SIZE):
            piece = tuple(tokens[start : start + BLOCK_SIZE])
            key = block_hash(parent, token_array(piece).tobytes(), salt)
            number = self.find(key)
            if number is None:
                number = self.pick([i for i, block in enumerate(self.blocks) if block is None])
                self.blocks[number] = Block(key, parent, piece, salt)
                self._log("stored", self.blocks[number], number)
            found.append(number)
            parent = key
        return found

    def remove(self, number: int, cause: str = "capacity", request_id: str = "") -> None:
        block = self.blocks[number]
        assert block is not None
        self.blocks[number] = None
        if self.find(block.hash) is None:
            self._log("removed", block, number, cause, request_id)

    def change(self, number: int, **fields: object) -> None:
        block = self.blocks[number]
        assert block is not None
        self.blocks[number] = dataclasses.replace(block, **fields)  # type: ignore[arg-type]

    def find(self, key: bytes) -> int | None:
        return next(
            (i for i, block in enumerate(self.blocks) if block is not None and block.hash == key), None
        )

    def _log(self, kind: str, block: Block, number: int, cause: str = "", request_id: str = "") -> None:
        self.events.append(
            CacheEvent(
                len(self.events) + 1,
                1.5e9,
                kind,  # type: ignore[arg-type]
                block_hash=block.hash,
                parent_hash=block.parent if kind == "stored" else b"",
                tokens=token_array(block.tokens).tobytes() if kind == "stored" else b"",
                salt=block.salt,
                block=number,
                cause=cause,
                request_id=request_id,
            )
        )

    # --- what it is asked ---------------------------------------------------------------------------------

    def answer(self, message: object) -> object:
        """The answer to any question or command."""
        self.questions.append(message)
        name = type(message).__name__
        return getattr(self, f"_on_{name}")(message)

    def _visible(self, block: Block, tenant: str) -> bool:
        return block.salt.startswith(tenant_bytes(tenant))

    def _on_BlocksQuery(self, query: BlocksQuery) -> BlocksPage:
        if query.tier == "disk":
            return BlocksPage(query.query_id, self.at, 0, BLOCK_SIZE, BLOCK_BYTES, 0, b"", b"", (), (), b"")
        self.before_page()
        end = min(query.first + min(query.limit, self.page), len(self.blocks))
        rows = self.blocks[query.first : end]
        shown = [b if b is not None and self._visible(b, query.tenant) else None for b in rows]
        other = [b is not None and not self._visible(b, query.tenant) for b in rows]
        partial = [b is not None and len(b.tokens) < BLOCK_SIZE for b in shown]
        flags = [FLAG_OTHER * a | FLAG_PARTIAL * b for a, b in zip(other, partial, strict=True)]
        columns: dict[str, object] = {}
        if query.content:
            columns = {
                "generations": tuple(int(b is not None) for b in shown),
                "hashes": tuple(b.hash if b else b"" for b in shown),
                "parents": tuple(b.parent if b else b"" for b in shown),
                "tokens": tuple(token_array(b.tokens).tobytes() if b else b"" for b in shown),
                "salts": tuple(b.salt if b else b"" for b in shown),
                "hits": tuple(b.hits if b else 0 for b in shown),
                "root": ROOT,
            }
        return BlocksPage(
            query.query_id,
            self.at,
            len(self.blocks),
            BLOCK_SIZE,
            BLOCK_BYTES,
            query.first,
            states=bytes(CACHED if b else FREE for b in shown),
            ref_counts=bytes(b.ref_count if b else 0 for b in shown),
            num_tokens=tuple(len(b.tokens) if b else 0 for b in shown),
            ages=tuple(b.age if b else 0.0 for b in shown),
            flags=bytes(flags),
            **columns,  # type: ignore[arg-type]
        )

    def _on_BlockQuery(self, query: BlockQuery) -> BlockDetail:
        found = self.find(query.block_hash) if query.block_hash else query.block_id
        number = len(self.blocks) if found is None else found
        block = self.blocks[number] if number < len(self.blocks) else None
        if number >= len(self.blocks) or (block and not self._visible(block, query.tenant)):
            return BlockDetail(query.query_id, self.at)
        if block is None:
            return BlockDetail(query.query_id, self.at, (number, 0), "FREE")
        parent = self.find(block.parent)
        return BlockDetail(
            query.query_id,
            self.at,
            (own_number(block.hash), 0) if query.tenant else (number, 1),
            "CACHED",
            block_hash=block.hash.hex(),
            parent_hash=block.parent.hex(),
            parent_block=-1 if parent is None else parent,
            token_ids=block.tokens,
            age=block.age,
            hits=block.hits,
        )

    def _on_ExplainQuery(self, query: ExplainQuery) -> Explanation:
        tokens, salt = query.token_ids, salt_digest(query.cache_salt, query.tenant)
        blocks, parent = [], ROOT
        while (len(blocks) + 1) * BLOCK_SIZE < len(tokens):
            piece = tokens[len(blocks) * BLOCK_SIZE : (len(blocks) + 1) * BLOCK_SIZE]
            key = block_hash(parent, token_array(piece).tobytes(), salt)
            number = self.find(key)
            if number is None:
                break
            blocks.append((number, 1))
            parent = key
        rest = tokens[len(blocks) * BLOCK_SIZE :]
        siblings = [
            Sibling((i, 1), b.tokens, min(_shared(b.tokens, rest), len(rest) - 1))
            for i, b in enumerate(self.blocks)
            if b is not None and b.parent == parent and b.salt == salt
        ]
        sibling = max(siblings, key=lambda s: s.num_shared, default=None)
        cached = len(blocks) * BLOCK_SIZE + (sibling.num_shared if sibling else 0)
        reason = "hit" if cached == len(tokens) - 1 else "partial" if sibling else "never_seen"
        return Explanation(
            query.query_id,
            self.at,
            len(tokens),
            cached,
            BLOCK_SIZE,
            tuple(blocks),
            0,
            reason,  # type: ignore[arg-type]
            sibling,
        )

    def _on_PlanQuery(self, query: PlanQuery) -> PlanAnswer:
        found = self._on_ExplainQuery(ExplainQuery(0, query.token_ids, query.cache_salt, query.tenant))
        need = -(-len(query.token_ids) // BLOCK_SIZE) - len(found.blocks)
        return PlanAnswer(
            query.query_id,
            self.at,
            "start",
            f"starts at once with {need} fresh blocks",
            "runner-0",
            found.blocks,
            num_cached_tokens=found.num_cached_tokens,
            allocate=need,
            allocate_at_most=need + query.num_choices,
        )

    def _on_HoldersQuery(self, query: HoldersQuery) -> HoldersAnswer:
        runner = ProcessInfo("runner", "runner-0", 9, 1, 1, 4, 2, True, False, True, 12.5)
        return HoldersAnswer(query.query_id, self.at, (runner,), tuple(self.holders), len(self.holders))

    def _on_RequestsQuery(self, query: RequestsQuery) -> RequestsPage:
        found = [i for i in self.requests if query.request_id in ("", i.request_id)]
        start = int(float.fromhex(query.cursor.split()[0])) if query.cursor else 0
        end = start + query.limit
        return RequestsPage(
            query.query_id,
            self.at,
            tuple(found[start:end]),
            f"{float(end).hex()} 0 {found[end - 1].request_id}" if end < len(found) else "",
        )

    def _on_AuditQuery(self, query: AuditQuery) -> AuditPage:
        checked = max(0, min(query.limit, len(self.blocks) - query.first))
        return AuditPage(query.query_id, self.at, len(self.blocks), checked, tuple(self.faults))

    def _on_EventsQuery(self, query: EventsQuery) -> EventsPage:
        if not query.boot_id:
            return EventsPage(query.query_id, self.at, ())
        if query.boot_id != self.boot_id or query.after < self.forget or query.after > len(self.events):
            return EventsPage(query.query_id, self.at, (), gap=True)
        found = self.events[query.after : query.after + query.limit]
        at = At(self.boot_id, query.after + len(found))
        mine = tuple(e for e in found if e.salt.startswith(tenant_bytes(query.tenant)))
        return EventsPage(query.query_id, at, mine, more=at.sequence < len(self.events))

    def _on_Evict(self, command: Evict) -> Cleared:
        salt = salt_digest(command.cache_salt, command.tenant)
        found = [
            i
            for i, b in enumerate(self.blocks)
            if b is not None and (self._visible(b, command.tenant) if command.all_salts else b.salt == salt)
        ]
        some = found[:4]
        for number in some:
            self.remove(number, "evict")
        return Cleared(command.query_id, self.at, len(some), more=len(found) > len(some))

    def _on_Clear(self, command: Clear) -> Cleared:
        if self.blockers and not command.force:
            return Cleared(
                command.query_id,
                self.at,
                in_use=sum(h.blocks for h in self.blockers),
                blockers=self.blockers,
                code="in_use",
                message="2 blocks are in use",
            )
        mine = [i for i, b in enumerate(self.blocks) if b is not None and self._visible(b, command.tenant)]
        self.blocks = [None if i in mine else b for i, b in enumerate(self.blocks)]
        self.events.append(CacheEvent(len(self.events) + 1, 1.5e9, "cleared", cause="clear"))
        return Cleared(command.query_id, self.at, len(mine))


def request(request_id: str, state: str = "running", computed: int = 32) -> RequestInfo:
    """A request of 40 prompt tokens."""
    sequence = SequenceInfo(0, 40, computed, 3, 1, ((1, 1), (2, 1), (3, 1)))
    return RequestInfo(
        request_id,
        "frontend-0",
        state,
        0,
        1.5,
        0,
        40,
        16,
        1,
        0,
        "runner-0",
        None,
        (sequence,),  # type: ignore[arg-type]
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
