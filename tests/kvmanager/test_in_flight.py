"""One prefill for many: who waits for a prefix in flight, and what wakes those that do."""

from typing import Any

from kvmanager.protocol import Cancel, Ended, Progress, Start, StepReport
from kvmanager.scheduling.requests import StartState
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene

PREFIX = list(range(100, 112))  # three blocks


class Crowd:
    """32 requests with one prefix, sent at once: the first has started. Two runners, room for all."""

    def __init__(self, size: int = 32, **policy: Any) -> None:
        self.scene = Scene(256, **policy)
        self.runners = [self.scene.runner(name, max_num_seqs=40) for name in ("one", "two")]
        self.frontend = self.scene.frontend()
        for number in range(size):
            message = submission(f"r{number}", [*PREFIX, number], arrival=float(number))
            self.scene.send(self.frontend, message)
        (self.first,) = self.starts()

    def starts(self) -> list[Start]:
        """New ones, in order."""
        found = [
            start
            for runner in self.runners
            for message in self.scene.received(runner)
            for start in message.starts
        ]
        return sorted(found, key=lambda start: start.start_id)

    def runner_of(self, start: Start) -> int:
        (active,) = (each for each in self.scene.core.state.actives() if each.start_id == start.start_id)
        return active.runner.client_id

    def send(self, start: Start, report: StepReport) -> None:
        self.scene.send(self.runner_of(start), report)

    def compute(self, start: Start, tokens: int) -> None:
        self.send(start, StepReport(progress=(Progress(start.start_id, 0, (), tokens),)))

    @property
    def waits(self) -> int:
        return self.scene.core.state.counters.prefix_waits


def cached(starts: list[Start]) -> list[int]:
    return [start.sequences[0].num_cached_tokens for start in starts]


def test_one_prefill_serves_all() -> None:
    crowd = Crowd()
    assert crowd.waits == 31
    crowd.compute(crowd.first, 4)
    crowd.compute(crowd.first, 11)
    assert crowd.starts() == []
    crowd.compute(crowd.first, 13)
    starts = crowd.starts()
    assert [start.request_id for start in starts] == [f"r{number}" for number in range(1, 32)]
    assert cached(starts) == [12] * 31
    counters = crowd.scene.core.state.counters
    computed = counters.prefix_cache_queries - counters.prefix_cache_hits
    assert computed == len(PREFIX) + 32
    assert crowd.waits == 31


def test_a_cancelled_producer_is_replaced_when_its_step_is_over() -> None:
    crowd = Crowd()
    crowd.compute(crowd.first, 4)
    crowd.scene.send(crowd.frontend, Cancel("r0", 0))
    assert not crowd.starts()
    crowd.send(crowd.first, StepReport(ended=(Ended(crowd.first.start_id, 0, (), 8, "cancelled"),)))
    (second,) = crowd.starts()
    assert (second.request_id, cached([second])) == ("r1", [8])
    crowd.compute(second, 13)
    assert cached(crowd.starts()) == [12] * 30


def test_a_preempted_producer_is_replaced_at_once() -> None:
    crowd = Crowd()
    state = crowd.scene.core.state
    (active,) = state.actives()
    active.state = StartState.PREEMPTING
    state.withdraw(active)
    crowd.scene.take(crowd.scene.core.tick(0.0))
    (second,) = crowd.starts()
    assert (second.request_id, cached([second])) == ("r1", [0])


def test_a_dead_producer_is_replaced_at_once() -> None:
    crowd = Crowd()
    crowd.scene.take(crowd.scene.core.process_died(0.0, "one"))
    (second,) = crowd.starts()
    assert second.request_id == "r1"
    assert len(crowd.scene.core.state.waiting) == 30


def test_a_producer_that_ends_early_is_replaced_at_once() -> None:
    crowd = Crowd(size=3)
    ended = Ended(crowd.first.start_id, 0, (), 5, "cancelled")
    crowd.send(crowd.first, StepReport(ended=(ended,)))
    (second,) = crowd.starts()
    assert cached([second]) == [5]


def test_nobody_waits_for_a_stalled_producer_beyond_the_bound() -> None:
    crowd = Crowd(prefix_wait=2.0)
    scene = crowd.scene
    scene.now = 1.0
    crowd.compute(crowd.first, 4)
    for now in (1.5, 2.9):
        scene.take(scene.core.tick(now))
        assert crowd.starts() == []
    scene.take(scene.core.tick(3.0))
    (second,) = crowd.starts()
    assert (second.request_id, cached([second])) == ("r1", [4])
    scene.now = 3.5
    crowd.compute(second, 13)
    assert cached(crowd.starts()) == [12] * 30
    crowd.compute(crowd.first, 13)


def test_waiting_for_a_prefix_holds_up_nobody_else() -> None:
    crowd = Crowd(size=4)
    crowd.scene.send(crowd.frontend, submission("other", [1, 2, 3, 4, 5], arrival=99.0))
    assert [start.request_id for start in crowd.starts()] == ["other"]
    assert len(crowd.scene.core.state.waiting) == 3


def test_who_waits_keeps_its_place() -> None:
    """One seat is left: the earliest of those that waited gets it, before one that came later."""
    scene = Scene(64)
    runner, frontend = scene.runner(max_num_seqs=2), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [*PREFIX, 1], arrival=0.0))
    scene.send(frontend, submission("b", [*PREFIX, 2], arrival=1.0))
    other, _ = scene.submit(frontend, runner, submission("c", [5] * 5, arrival=2.0))
    scene.send(frontend, submission("d", [6] * 5, arrival=3.0))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 13),)))
    assert [message for message in scene.received(runner) if message.starts] == []
    scene.end(runner, other, 5)
    assert scene.start(runner).request_id == "b"


def test_one_that_waits_can_be_cancelled() -> None:
    crowd = Crowd(size=3)
    crowd.scene.send(crowd.frontend, Cancel("r1", 0))
    crowd.compute(crowd.first, 13)
    assert [start.request_id for start in crowd.starts()] == ["r2"]


def test_those_that_wait_count_as_waiting() -> None:
    crowd = Crowd(size=3, max_waiting=2)
    crowd.scene.send(crowd.frontend, submission("more", [1]))
    assert [type(message).__name__ for message in crowd.scene.received(crowd.frontend)] == [
        "Accepted",
        "Accepted",
        "Accepted",
        "Rejected",
    ]


def test_a_prompt_of_whole_blocks_waits_for_its_last_one_too() -> None:
    scene = Scene(64)
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", PREFIX))
    scene.send(frontend, submission("b", PREFIX))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 8),)))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 12),)))
    assert scene.start(runner).sequences[0].num_cached_tokens == 11


def test_another_salt_and_read_cache_off_wait_for_nobody() -> None:
    scene = Scene(64)
    runner, frontend = scene.runner(), scene.frontend()
    scene.submit(frontend, runner, submission("a", PREFIX))
    scene.submit(frontend, runner, submission("b", PREFIX, salt="other"))
    scene.submit(frontend, runner, submission("c", PREFIX, read_cache=False))
    assert scene.core.state.counters.prefix_waits == 0


def test_no_wait_where_it_is_switched_off() -> None:
    scene = Scene(64, prefix_wait=0.0)
    runner, frontend = scene.runner(), scene.frontend()
    scene.submit(frontend, runner, submission("a", PREFIX))
    scene.submit(frontend, runner, submission("b", PREFIX))
