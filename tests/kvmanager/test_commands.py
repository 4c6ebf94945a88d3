"""Evict and Clear by example: what goes, what stays and with whom, in parts, in the tier, over a restart."""

from typing import Any

import msgspec
import pytest

from kvmanager.asking import commands
from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, SEALED, BlockPool
from kvmanager.protocol import Clear, Cleared, Evict, Pin, Progress, StepReport, TextPart
from kvmanager.restore import restore_pool
from kvmanager.scheduling.clients import Frontend
from kvmanager.tier.tiers import Tier
from tests.kvmanager.asking import TENANTS, Asker
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene
from tests.kvmanager.test_explain import TEXT, AskedScene

LONG = list(range(200, 216))  # four full blocks


def cached(scene: Scene, tokens: list[int], **whose: str) -> int:
    return Asker(scene, scene.frontend("x")).explain([*tokens, 9], **whose).num_cached_tokens


def test_a_prefix_goes_with_all_that_follows_it() -> None:
    scene = AskedScene()
    scene.run(scene.client, scene.worker, submission("b", [*TEXT[:8], 1, 2, 3, 4], max_tokens=1))
    scene.run(scene.client, scene.worker, submission("c", [*TEXT[:4], 5, 5, 5, 5], max_tokens=1))
    scene.run(scene.client, scene.worker, submission("d", [7] * 8, max_tokens=1))
    assert scene.asker.evict(token_ids=tuple(TEXT[:9])) == (3, 0)
    assert (cached(scene, TEXT), cached(scene, [*TEXT[:4], 5, 5, 5, 5]), cached(scene, [7] * 8)) == (4, 8, 8)
    assert scene.asker.evict(token_ids=tuple(TEXT[:2])) == (2, 0)
    assert (cached(scene, TEXT), cached(scene, [7] * 8)) == (0, 8)
    said = scene.asker.explain(TEXT)
    assert said.eviction is not None
    assert said.eviction.cause == "evict"


def test_what_is_in_use_stays() -> None:
    scene = AskedScene()
    start, _ = scene.submit(scene.client, scene.worker, submission("b", [*TEXT, 1], max_tokens=3))
    assert scene.asker.evict() == (0, 3)
    scene.end(scene.worker, start, 11)
    assert scene.asker.evict(all_salts=True) == (4, 0)
    assert scene.pool.counts[FREE] == 16


def test_salts_and_tenants_are_apart() -> None:
    scene = AskedScene()
    for salt, tenant in (("s", ""), ("", TENANTS[0]), ("s", TENANTS[0]), ("", TENANTS[1])):
        made = submission(f"{salt}-{tenant}", TEXT, salt=salt, max_tokens=1)
        scene.run(scene.client, scene.worker, msgspec.structs.replace(made, tenant=tenant))
    assert scene.asker.evict(cache_salt="s") == (3, 0)
    assert cached(scene, TEXT, tenant=TENANTS[0], salt="s") == 10
    assert scene.asker.evict(cache_salt="s", tenant=TENANTS[0]) == (3, 0)
    assert scene.asker.clear(tenant=TENANTS[0]) == (3, 0)
    assert [cached(scene, TEXT, tenant=tenant) for tenant in ("", *TENANTS)] == [10, 0, 10]
    assert scene.asker.evict(all_salts=True) == (6, 0)


def test_a_clear_is_refused_while_anything_is_used_and_says_by_whom() -> None:
    scene = AskedScene()
    scene.send(scene.client, Pin(1, "kept", tuple(TEXT[:4]), "", 10.0))
    start, _ = scene.submit(scene.client, scene.worker, submission("busy", [*TEXT, 1], max_tokens=3))
    scene.submit(scene.client, scene.worker, submission("fresh", [3] * 3, max_tokens=3))
    refused: Cleared = scene.asker.ask(Clear(1))
    assert (refused.code, refused.evicted, refused.in_use) == ("in_use", 0, 3)
    assert {(blocker.kind, blocker.name) for blocker in refused.blockers} == {
        ("pin", "kept"),
        ("sequence", "busy"),
    }
    assert scene.asker.ask(Clear(1, tenant=TENANTS[0])).code == ""
    scene.end(scene.worker, start, 11)
    assert [blocker.kind for blocker in scene.asker.ask(Clear(1)).blockers] == ["pin"]


def test_a_forced_clear_leaves_blocks_to_those_who_use_them() -> None:
    scene = AskedScene()
    scene.send(scene.client, Pin(1, "kept", tuple(TEXT[:4]), "", 10.0))
    start, _ = scene.submit(scene.client, scene.worker, submission("busy", [*TEXT[:8], 1], max_tokens=6))
    last = scene.core.state.at().sequence
    assert scene.asker.clear(force=True) == (1, 2)
    assert [e.kind for e in scene.asker.events("boot", last).events] == [*["removed"] * 3, "cleared"]
    assert not scene.core.state.pins.by_key
    assert scene.pool.counts[SEALED] == 2
    assert cached(scene, TEXT) == 0
    scene.send(scene.worker, StepReport(progress=(Progress(start.start_id, 0, (2, 3, 4), 12),)))
    assert (scene.pool.counts[SEALED], len(scene.pool.index)) == (3, 0)
    other, again = scene.submit(scene.client, scene.worker, submission("again", [*TEXT[:8], 1], max_tokens=6))
    assert again.num_cached_tokens == 0
    scene.end(scene.worker, start, 12, new=(5,))
    assert not scene.pool.unfound
    scene.end(scene.worker, other, 9)
    assert cached(scene, TEXT) == 8
    assert scene.pool.counts[FREE] == 13


def test_records_of_what_nobody_finds_are_no_content() -> None:
    """A restart finds nothing of it, and keeps it out of use while anybody lives who may read it."""
    scene = AskedScene()
    scene.submit(scene.client, scene.worker, submission("busy", [*TEXT[:8], 1], max_tokens=6))
    scene.asker.clear(force=True)
    records = [scene.pool.record(block) for block in range(16)]
    pool, quarantines = restore_pool(LAYOUT, records, ("r", "f"))
    assert (pool.counts[CACHED], pool.counts[QUARANTINED]) == (0, 3)
    assert {quarantine.lock for quarantine in quarantines} == {"", "r"}
    pool, quarantines = restore_pool(LAYOUT, records, ())
    assert pool.counts[FREE] == 16


def test_it_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of any size forget the same, each client's for itself, though something happens between them."""
    monkeypatch.setattr(commands, "MAX_COST", 8)
    scene = AskedScene()
    other = Asker(scene, scene.frontend("other"))
    first: Cleared = scene.asker.ask(Evict(1))
    assert (first.evicted, first.more) == (1, True)
    assert other.ask(Evict(2)).evicted == 1
    scene.run(scene.client, scene.worker, submission("b", [5] * 8, max_tokens=1))
    assert scene.asker.evict()[0] >= 1
    other.evict()
    assert scene.asker.evict() == (0, 0)
    assert scene.pool.counts[FREE] == 16
    for number in range(40):
        other.ask(Evict(3, (number,)))
        scene.run(scene.client, scene.worker, submission(f"n{number}", [number] * 4, max_tokens=1))
        other.ask(Evict(3, tuple([number] * 4)))
    sweeps = [client.sweeps for client in scene.core.state.clients.values() if isinstance(client, Frontend)]
    assert max(map(len, sweeps)) == commands.MAX_SWEEPS


def test_a_long_text_comes_once_and_its_hash_stands_for_it_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_COST", 8)
    scene = AskedScene()
    for number in range(3):
        scene.run(scene.client, scene.worker, submission(f"n{number}", [*LONG, *[number] * 4], max_tokens=1))
    tokens = tuple(LONG[:8])
    first: Cleared = scene.asker.ask(Evict(1, tokens), part=3)
    assert (first.evicted, first.more) == (1, True)
    assert scene.asker.ask(Evict(2, tokens)).evicted == 1, "the same, all at once, goes on"
    for whose in ({"cache_salt": "s"}, {"tenant": TENANTS[0]}):
        assert scene.asker.evict(prefix=first.prefix, **whose) == (0, 0)
    assert scene.asker.evict(prefix=first.prefix) == (4, 0)
    assert cached(scene, LONG) == 4


def test_a_torn_text_is_no_command() -> None:
    """Nothing is done, as it would be about another text; the next one is none of it."""
    scene = AskedScene()
    part, rest = tuple(TEXT[:4]), tuple(TEXT[4:])
    for message in (
        Pin(1, "p", rest, "", 10.0, start=4),
        Evict(2, rest, start=4),
        TextPart(3, part),
        Evict(3, rest, start=3),
        TextPart(4, rest, start=4),
        Pin(4, "p", part, "", 10.0, start=10),
    ):
        scene.received(scene.client)
        scene.send(scene.client, message)
        assert not scene.received(scene.client)
    assert scene.core.state.counters.dropped_messages == 4
    assert scene.asker.evict(token_ids=tuple(TEXT)) == (2, 0)


def test_before_all_of_an_earlier_start_are_heard_of_nothing_is_forgotten() -> None:
    scene = Scene(0)
    scene.core.attach(BlockPool(8, LAYOUT), survivors=("old",))
    assert Asker(scene, scene.frontend()).ask(Evict(1)).code == "not_ready"
    assert Asker(Scene(0), 0)._client == 0


class TieredScene(Scene):
    """Half of LONG has been copied down, and is in the pool too."""

    def __init__(self) -> None:
        super().__init__(0)
        self.core.attach(BlockPool(4, LAYOUT), tier=Tier(8))
        self.client, self.worker = self.frontend(), self.runner()
        self.asker = Asker(self, self.client)
        self.run(self.client, self.worker, submission("first", LONG, max_tokens=1))
        self.finish_copies()

    @property
    def tier(self) -> Tier:
        assert self.core.state.tiering is not None
        return self.core.state.tiering.tier

    def finish_copies(self) -> list[int]:
        """All that are under way, well. Slots erased by that."""
        erased = []
        for copies, promotion in ((self.tier.demoting, False), (self.tier.promoting, True)):
            for copy in list(copies.values()):
                effects = self.core.copied(self.now, copy, promotion, True, 0.1)
                erased += effects.erasures
                self.take(effects)
        return erased


def erased(scene: TieredScene, message: Any) -> list[int]:
    effects = scene.core.handle(scene.now, scene.client, message)
    scene.take(effects)
    return effects.erasures


def test_the_tier_forgets_too_and_the_disk_is_told() -> None:
    scene = TieredScene()
    assert len(scene.tier) == 2
    slots = {slot for slot, _ in scene.tier.contents()}
    assert set(erased(scene, Evict(1, tuple(LONG[:4])))) == slots
    assert len(scene.tier) == 0
    assert scene.tier.num_free == 8


def test_copies_of_what_is_forgotten_come_to_nothing() -> None:
    scene = TieredScene()
    scene.run(scene.client, scene.worker, submission("b", [5] * 8, max_tokens=1))
    under_way = [copy.slot for copy in scene.tier.demoting.values()]
    assert under_way
    assert not set(under_way) & set(erased(scene, Clear(1, True)))
    assert scene.finish_copies() == under_way
    assert (len(scene.tier), scene.tier.num_free) == (0, 8)


def test_a_promotion_of_what_is_forgotten_is_no_content() -> None:
    scene = TieredScene()
    for number in range(4):
        scene.run(scene.client, scene.worker, submission(f"m{number}", [number] * 12, max_tokens=1))
        scene.finish_copies()
    assert scene.asker.plan(LONG, 1).outcome == "wait_for_tier"
    scene.send(scene.client, submission("waits", LONG, max_tokens=1))
    slots = {copy.slot for copy in scene.tier.promoting.values()}
    assert slots
    assert not slots & set(erased(scene, Clear(1, True)))
    assert set(scene.finish_copies()) >= slots
    start = scene.start(scene.worker)
    assert start.sequences[0].num_cached_tokens == 0
    assert len(start.sequences[0].block_table) == -(-len(LONG) // BLOCK_SIZE)
