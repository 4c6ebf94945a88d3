"""Priorities: who overtakes, who has to give way, and what that costs."""

from kvmanager.protocol import Directives, Ended, Progress, Start, Stats, StatsQuery, StepReport
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene


def preempts(scene: Scene, runner: int) -> list[int]:
    """Preemptions that came since the last look; starts are dropped."""
    messages = [message for message in scene.received(runner) if isinstance(message, Directives)]
    return [start_id for message in messages for start_id in message.preempts]


def give_way(scene: Scene, runner: int, start: Start, computed: int) -> None:
    scene.end(runner, start, computed, "preempted")


def test_a_high_priority_overtakes_in_the_queue() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    first, _ = scene.submit(frontend, runner, submission("a", [1], priority=-9))
    scene.send(frontend, submission("low", [2], arrival=1.0))
    scene.send(frontend, submission("high", [3], arrival=2.0, priority=-1))
    scene.end(runner, first, 1)
    assert scene.start(runner).request_id == "high"


def test_a_high_priority_takes_the_seat_of_the_last_of_the_lowest() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=3), scene.frontend()
    starts = {
        name: scene.submit(frontend, runner, submission(name, [key] * 5, arrival=key, priority=priority))[0]
        for name, key, priority in (("early", 1, 1), ("late", 2, 1), ("middle", 3, 0))
    }
    scene.send(frontend, submission("high", [9], arrival=9.0, priority=-1))
    assert preempts(scene, runner) == [starts["late"].start_id]
    scene.take(scene.core.tick(scene.now))
    assert preempts(scene, runner) == []
    give_way(scene, runner, starts["late"], 5)
    high = scene.start(runner)
    assert high.request_id == "high"
    assert scene.core.state.counters.preemptions == 1
    scene.end(runner, high, 1)
    (resumed,) = scene.start(runner).sequences
    assert resumed.num_cached_tokens == 4


def test_an_equal_priority_waits() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.submit(frontend, runner, submission("a", [1]))
    scene.send(frontend, submission("b", [2]))
    assert preempts(scene, runner) == []


def test_blocks_are_taken_from_as_many_as_it_takes_one_after_the_other() -> None:
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    starts = [
        scene.submit(frontend, runner, submission(name, [key] * 8, arrival=key, priority=1, max_tokens=1))[0]
        for name, key in (("a", 1), ("b", 2), ("c", 3))
    ]
    scene.send(frontend, submission("high", [9] * 20, arrival=9.0, max_tokens=1))
    assert preempts(scene, runner) == [starts[2].start_id]
    give_way(scene, runner, starts[2], 8)
    assert preempts(scene, runner) == [starts[1].start_id]
    give_way(scene, runner, starts[1], 8)
    assert scene.start(runner).request_id == "high"


def test_nobody_gives_way_in_vain() -> None:
    """All that the low one holds would not be enough, as an equal one holds the rest."""
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    scene.submit(frontend, runner, submission("equal", [1] * 20, max_tokens=1))
    scene.submit(frontend, runner, submission("low", [2] * 8, priority=1, max_tokens=1))
    scene.send(frontend, submission("high", [9] * 20, arrival=9.0, max_tokens=1))
    assert preempts(scene, runner) == []


def test_a_silent_runner_is_not_asked_to_give_way() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.submit(frontend, runner, submission("low", [1], priority=1))
    scene.now = 5.0
    scene.send(frontend, submission("high", [2]))
    assert preempts(scene, runner) == []
    scene.send(runner, None)
    scene.take(scene.core.tick(scene.now))
    assert len(preempts(scene, runner)) == 1


def test_one_that_waits_for_a_prefix_takes_no_seat() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("low", [1] * 9, priority=1))
    scene.send(frontend, submission("high", [1] * 9))
    assert preempts(scene, runner) == []
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 9),)))
    assert preempts(scene, runner) == [start.start_id]


def test_recomputed_tokens_are_counted() -> None:
    """What a start had computed and its resumption does not find: here its blocks were evicted."""
    scene = Scene(4)
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("low", [1] * 8, priority=1, max_tokens=3))
    scene.send(frontend, submission("high", [2] * 16, max_tokens=1))
    assert preempts(scene, runner) == [start.start_id]
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (5,), 8, "preempted"),)))
    scene.end(runner, scene.start(runner), 16)
    (resumed,) = scene.start(runner).sequences
    assert (resumed.output_token_ids, resumed.num_cached_tokens) == ((5,), 0)
    scene.received(frontend)
    scene.send(frontend, StatsQuery(1))
    (stats,) = scene.received(frontend)
    assert isinstance(stats, Stats)
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 8)
