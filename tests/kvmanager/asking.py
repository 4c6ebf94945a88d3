"""Questions in few words, a follower of events, and pages put together: for tests of what can be asked."""

import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvmanager.protocol import (
    MAX_PAGE,
    MAX_PART,
    AuditPage,
    AuditQuery,
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
    PlanAnswer,
    PlanQuery,
    Query,
    RequestInfo,
    RequestsPage,
    RequestsQuery,
    TextPart,
)
from kvmanager.state import State
from services.backend import in_parts
from tests.kvmanager.fake_clients import FakeFrontend
from tests.kvmanager.scene import Scene
from tests.kvmanager.world import World

TENANTS = ("aa" * 16, "bb" * 16)


class Asker:
    """Puts questions through a client of a scene, or a frontend of a world."""

    def __init__(self, place: Scene | World, client: "int | FakeFrontend") -> None:
        self._place = place
        self._client = client
        self.between: Callable[[], object] = lambda: None

    def ask(self, message: Query, part: int = MAX_PART) -> Any:
        """The answer; a longer text comes in parts of so many tokens. The frontend must have a session."""
        *parts, message = in_parts(message, part)
        for each in parts:
            self.tell(each)
        place, client = self._place, self._client
        if isinstance(client, int):
            client_id = client
        else:
            assert client.session is not None
            client_id = client.session[1]
        effects = place.core.handle(place.now, client_id, message)
        (answer,) = (
            each for _, each in effects.messages if getattr(each, "query_id", None) == message.query_id
        )
        effects.messages = [pair for pair in effects.messages if pair[1] is not answer]
        if isinstance(place, Scene):
            place.take(effects)
        else:
            place.carry_out(effects)
        return answer

    def explain(self, tokens: list[int], salt: str = "", tenant: str = "", part: int = 0) -> Explanation:
        """In parts of so many tokens, and with `between` each of them, if that is given."""
        start = 0
        while part and len(tokens) - start > part:
            self.tell(TextPart(1, tuple(tokens[start : start + part]), salt, tenant, start))
            self.between()
            start += part
        answer: Explanation = self.ask(ExplainQuery(1, tuple(tokens[start:]), salt, tenant, start))
        return answer

    def tell(self, message: Query) -> None:
        """What has no answer. It is left out where the frontend has lost its session."""
        place, client = self._place, self._client
        if isinstance(place, Scene):
            assert isinstance(client, int)
            place.send(client, message)
        else:
            assert not isinstance(client, int)
            client.send(message)

    def plan(self, tokens: list[int], max_tokens: int = 4, **more: Any) -> PlanAnswer:
        answer: PlanAnswer = self.ask(PlanQuery(2, tuple(tokens), max_tokens, **more))
        return answer

    def evict(self, **what: Any) -> tuple[int, int]:
        """All of it. Evicted blocks, and those that stayed."""
        return self._to_the_end(Evict(3, **what))

    def clear(self, **what: Any) -> tuple[int, int]:
        return self._to_the_end(Clear(4, **what))

    def _to_the_end(self, message: Evict | Clear) -> tuple[int, int]:
        evicted = 0
        for _ in range(1000):
            done: Cleared = self.ask(message, part=3)
            assert not done.code, done
            evicted += done.evicted
            if not done.more:
                return evicted, done.in_use
            if done.prefix:
                message = msgspec.structs.replace(message, token_ids=(), prefix=done.prefix)
        raise AssertionError("it does not end")

    def blocks(self, page: int = MAX_PAGE, tenant: str = "", tier: Any = "pool") -> list[BlocksPage]:
        """All pages."""
        pages = [self.ask(BlocksQuery(5, 0, page, True, tenant, tier))]
        while (end := pages[-1].first + len(pages[-1].states)) < pages[-1].num_blocks:
            pages.append(self.ask(BlocksQuery(5, end, page, True, tenant, tier)))
        return pages

    def events(self, boot_id: str, after: int, limit: int = 1024, tenant: str = "") -> EventsPage:
        answer: EventsPage = self.ask(EventsQuery(6, boot_id, after, limit, tenant))
        return answer

    def requests(self, limit: int = 256, **what: Any) -> list[RequestInfo]:
        """All pages."""
        found: list[RequestInfo] = []
        cursor = ""
        while True:
            page: RequestsPage = self.ask(RequestsQuery(7, cursor=cursor, limit=limit, **what))
            found += page.requests
            cursor = page.next_cursor
            if not cursor:
                return found

    def audit(self, limit: int) -> list[str]:
        """All pages."""
        faults: list[str] = []
        first = 0
        while True:
            page: AuditPage = self.ask(AuditQuery(8, first, limit))
            faults += page.faults
            first += page.checked
            if first >= page.num_blocks:
                return faults


EVERY_KIND = {
    *("hit", "never_seen", "evicted", "partial", "being_computed", "from the tier"),
    *("start", "wait_for_turn", "wait_for_prefix", "wait_for_room", "refuse"),
    *("evicts", "preempts", "evicted by a command", "not evicted, as in use"),
    *("cleared in_use", "cleared by force some"),
}
"""Of answers, each of which a long history must bring."""


def text(chance: random.Random) -> list[int]:
    """Few beginnings, so that texts meet."""
    head = chance.choice([[], [0] * 4, [0] * 12, [0, 0, 0, 0, 1, 1, 1, 1], [1] * 7])
    return [*head, *(chance.randrange(2) for _ in range(chance.randrange(1, 7)))]


TIERS: tuple[Literal["pool", "disk"], ...] = ("pool", "disk")

Key = tuple[str, bytes]
Known = tuple[Any, ...]
"""Parent hash, tokens, salt."""


class Follower:
    """What a reader of snapshots and events believes is found: (tier, hash) → what it is."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        self.between = between
        self.boot_id = ""
        self.sequence = 0
        self.found: dict[Key, Known] = {}

    def follow(self, asker: Asker, limit: int = 3, page: int = 4) -> None:
        """Catch up; with a snapshot where events do not follow on what it has."""
        for _ in range(100_000):
            events = asker.events(self.boot_id, self.sequence, limit)
            if events.gap or not self.boot_id or events.at.boot_id != self.boot_id:
                self.snapshot(asker, page)
                continue
            for event in events.events:
                self.apply(event)
            self.sequence = events.at.sequence
            if not events.more:
                return

    def snapshot(self, asker: Asker, page: int) -> None:
        """Page after page: `between` may change the cache meanwhile."""
        self.found.clear()
        self.boot_id = ""
        for tier in TIERS:
            first, end = 0, 1
            while first < end:
                part: BlocksPage = asker.ask(BlocksQuery(5, first, page, True, "", tier))
                if not self.boot_id:
                    self.boot_id, self.sequence = part.at.boot_id, part.at.sequence
                for digest, *known in zip(part.hashes, part.parents, part.tokens, part.salts, strict=True):
                    if digest:
                        self.found[tier, digest] = tuple(known)
                first, end = first + page, part.num_blocks
                self.between()

    def apply(self, event: CacheEvent) -> None:
        """Twice is as good as once."""
        if event.kind == "cleared":
            self.found.clear()
        elif event.kind == "stored":
            self.found[event.tier, event.block_hash] = (event.parent_hash, event.tokens, event.salt)
        else:
            self.found.pop((event.tier, event.block_hash), None)


def truth(state: State) -> dict[Key, Known]:
    """What is really found."""
    pool = state.pool
    assert pool is not None
    found: dict[Key, Known] = {}
    for digest, blocks in pool.index.entries().items():
        block = blocks[0]
        found["pool", digest] = (pool.parent_hash[block], pool.tokens[block], pool.salt[block])
    if state.tiering is not None:
        for _, content in state.tiering.tier.contents():
            found["disk", content.block_hash] = (content.parent_hash, content.tokens, content.salt)
    return found
