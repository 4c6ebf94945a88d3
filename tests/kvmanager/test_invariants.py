"""The audit finds what it is there for: each kind of damage to a healthy core is reported."""

from collections.abc import Callable

import pytest

from kvmanager.pool.block_pool import CACHED, FREE, RESERVED, SEALED, BlockPool
from kvmanager.pool.invariants import audit
from kvmanager.protocol import Progress, StepReport
from kvmanager.scheduling.requests import RequestState
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene


def healthy() -> Scene:
    """One request is done (block 0 cached), one runs (a sealed and a reserved block), two wait."""
    scene = Scene(8)
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.run(frontend, runner, submission("a", [1] * 4))
    start, _ = scene.submit(frontend, runner, submission("b", [2] * 6))
    scene.send(frontend, submission("c", [3]))
    scene.send(frontend, submission("d", [3]))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 6),), credits_wanted=1))
    return scene


def running(scene: Scene):  # type: ignore[no-untyped-def]
    (active,) = scene.core.state.actives()
    return active.sequences[0]


def swap_queue(scene: Scene) -> None:
    entries = scene.core.state.waiting._entries
    entries.reverse()


def hold(pool: BlockPool, block: int, tokens: bytes) -> None:
    """Other tokens than it had."""
    pool.contents[block] = (*pool.contents[block][:3], tokens)


DAMAGE: dict[str, tuple[Callable[[Scene], object], str]] = {
    "counts": (lambda s: setattr(s.pool, "num_sealed", 99), "are counted"),
    "queues": (lambda s: s.pool.cached.remove(0), "wrong queue"),
    "held though free": (lambda s: s.pool.ledger.add(7, running(s)), "with 1 references"),
    "not in the index": (lambda s: s.pool.index.remove(s.pool.block_hash[0], 0), "the index says otherwise"),
    "content of a free block": (lambda s: hold(s.pool, 7, b"x"), "has a hash or tokens"),
    "hash": (lambda s: hold(s.pool, 0, bytes(16)), "not that of its content"),
    "length": (lambda s: s.pool.partial.add(0), "taken for another length"),
    "children": (lambda s: s.pool.children.remove(s.pool.root, 0), "the child"),
    "a stray child": (lambda s: s.pool.children.add(b"", 7), "and a child"),
    "unfound and found": (lambda s: s.pool.unfound.add(0), "the index says otherwise"),
    "unfound and kept": (lambda s: s.pool.unfound.add(0), "found no more, and kept"),
    "unfound and free": (lambda s: s.pool.unfound.add(7), "has a hash or tokens"),
    "salts": (lambda s: s.pool.of_salt.setdefault(b"", set()).add(0), "those of its salt"),
    "a stray copy": (lambda s: s.pool.index.add(b"x", 7), "in the index"),
    "not in the ledger": (lambda s: running(s).table.append(7), "held by somebody else"),
    "ledger": (lambda s: running(s).table.pop(), "is held by"),
    "eviction": (lambda s: setattr(s.pool, "may_evict", False), "may_evict"),
    "clients": (lambda s: s.core.state.by_lock.clear(), "clients by lock"),
    "runners": (lambda s: s.core.state.runners.clear(), "the runners are not"),
    "seats": (lambda s: setattr(s.core.state.runners[0], "seats", 5), "counts 5 seats"),
    "sealed": (lambda s: setattr(running(s), "num_computed", 8), "blocks sealed of 8 tokens"),
    "writes sealed": (lambda s: setattr(running(s), "num_sealed", 0), "writes block"),
    "reads wrong": (lambda s: running(s).tokens.__setitem__(0, 9), "does not hold its tokens"),
    "chain": (lambda s: setattr(running(s), "last_hash", b""), "another chain"),
    "order": (swap_queue, "not in order"),
    "waiting": (lambda s: setattr(s.core.state.waiting.first, "state", RequestState.RUNNING), "waits and is"),
    "placed": (lambda s: s.core.state.waiting.remove(s.core.state.waiting.first), "wrong place"),
    "nothing to run": (lambda s: s.core.state.actives()[0].sequences.clear(), "nothing to run"),
    "announced": (lambda s: s.core.state.in_flight.producers.update({b"x": running(s)}), "not announced"),
    "set aside": (lambda s: setattr(s.core.state.waiting.first, "awaited", b"x"), "not those set aside"),
    "asleep": (
        lambda s: s.core.state.in_flight.await_block(next(iter(s.core.state.waiting)), b"x"),
        "that nobody computes",
    ),
    "memory": (
        lambda s: s.core.state.waiting.first.frontend.gone.update(dict.fromkeys(map(str, range(9000)), 0)),
        "are remembered",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str) -> None:
    scene = healthy()
    assert audit(scene.core.state) == []
    damage, words = DAMAGE[name]
    damage(scene)
    assert [line for line in audit(scene.core.state) if words in line]


def test_a_core_without_a_pool_is_well() -> None:
    assert audit(Scene(0).core.state) == []


def test_the_healthy_scene_has_one_of_each() -> None:
    scene = healthy()
    assert {scene.pool.state[block] for block in range(8)} == {FREE, RESERVED, SEALED, CACHED}
