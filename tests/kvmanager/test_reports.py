"""Step reports with a fault: each is refused whole, its runner fenced, its blocks kept out of use."""

from collections.abc import Callable

import pytest

from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, RESERVED, SEALED
from kvmanager.protocol import (
    Copied,
    Ended,
    Fenced,
    Forked,
    Progress,
    RunnerLost,
    Start,
    StepReport,
    Taken,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene

Credits = list[tuple[int, int]]


def prepared() -> tuple[Scene, int, int, Start, Credits]:
    """A runner with one sequence of 6 tokens in 2 blocks, the first of them sealed, and 3 credits."""
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 6, max_tokens=5, n=2))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 6),), credits_wanted=3))
    return scene, runner, frontend, start, scene.credits(runner)


FAULTS: dict[str, Callable[[int, Credits], StepReport]] = {
    "unknown start": lambda s, c: StepReport(progress=(Progress(s + 1, 0, (), 6),)),
    "unknown choice": lambda s, c: StepReport(taken=(Taken(s, 1, (c[0],)),)),
    "backwards": lambda s, c: StepReport(progress=(Progress(s, 0, (), 5),)),
    "more than known": lambda s, c: StepReport(progress=(Progress(s, 0, (), 7),)),
    "more than the table": lambda s, c: StepReport(progress=(Progress(s, 0, (2,) * 4, 9),)),
    "more than max_tokens": lambda s, c: StepReport(ended=(Ended(s, 0, (2,) * 6, 6, "finished"),)),
    "token below 0": lambda s, c: StepReport(progress=(Progress(s, 0, (-1,), 6),)),
    "token beyond 32 bits": lambda s, c: StepReport(progress=(Progress(s, 0, (1 << 32,), 6),)),
    "ended twice": lambda s, c: StepReport(ended=(Ended(s, 0, (), 6, "finished"),) * 2),
    "taken after the end": lambda s, c: StepReport(
        ended=(Ended(s, 0, (), 6, "finished"),), taken=(Taken(s, 0, (c[0],)),)
    ),
    "fork of itself": lambda s, c: StepReport(forked=(Forked(s, 0, (0,)),)),
    "fork twice": lambda s, c: StepReport(forked=(Forked(s, 0, (1, 1)),)),
    "fork beyond the limit": lambda s, c: StepReport(forked=(Forked(s, 0, (128,)),)),
    "a child fills a block": lambda s, c: StepReport(
        forked=(Forked(s, 0, (1,)),), ended=(Ended(s, 1, (2, 2), 8, "finished"),)
    ),
    "a forked one fills a block": lambda s, c: StepReport(
        forked=(Forked(s, 0, (1,)),), ended=(Ended(s, 0, (2, 2), 8, "finished"),)
    ),
    "copy of a sealed block": lambda s, c: StepReport(copied=(Copied(s, 0, 0, c[0]),)),
    "copy beyond the table": lambda s, c: StepReport(copied=(Copied(s, 0, 2, c[0]),)),
    "a block that is no credit": lambda s, c: StepReport(returned=((15, 0),)),
    "an old generation": lambda s, c: StepReport(returned=((c[0][0], c[0][1] - 1),)),
    "the same credit twice": lambda s, c: StepReport(returned=(c[0], c[1], c[0])),
    "taken and returned": lambda s, c: StepReport(taken=(Taken(s, 0, (c[0],)),), returned=(c[0],)),
    "credits below 0": lambda s, c: StepReport(returned=(c[0],), credits_wanted=-1),
    "credits beyond reason": lambda s, c: StepReport(credits_wanted=1 << 40),
    "tail tokens below 0": lambda s, c: StepReport(num_tail_tokens=-1),
    "more tail tokens than slots": lambda s, c: StepReport(num_tail_tokens=16 * 4 + 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_report_with_a_fault_is_refused_whole(fault: str) -> None:
    scene, runner, frontend, start, credits = prepared()
    reasons: list[str] = []
    scene.core.on_fault = reasons.append
    scene.received(frontend)
    scene.send(runner, FAULTS[fault](start.start_id, credits))
    assert len(reasons) == 1
    assert "'r' is fenced" in reasons[0]
    assert scene.received(runner) == [Fenced("boot")]
    assert scene.ended == [runner]
    assert scene.received(frontend) == [RunnerLost((("a", 0),))]
    # What it held is out of use: one sealed block, one unsealed one, three credits.
    assert scene.pool.counts == [11, 0, 1, 0, 4]
    scene.take(scene.core.process_died(scene.now, "r"))
    assert scene.pool.counts == [15, 0, 0, 1, 0]


def test_a_fenced_runner_that_says_hello_gives_its_blocks_back() -> None:
    scene, runner, _, _, _ = prepared()
    scene.send(runner, StepReport(credits_wanted=-1))
    assert scene.pool.counts[QUARANTINED] == 4
    (quarantine,) = scene.core.state.quarantines.values()
    assert "'r'" in quarantine.describe()
    again = scene.runner()
    assert again != runner
    assert (scene.pool.counts[QUARANTINED], scene.pool.counts[CACHED]) == (0, 1)


def test_forked_sequences_of_a_fenced_runner_are_quarantined_once() -> None:
    scene, runner, _, start, _ = prepared()
    scene.send(runner, StepReport(forked=(Forked(start.start_id, 0, (1,)),), credits_wanted=3))
    scene.send(runner, StepReport(credits_wanted=-1))
    assert scene.pool.counts == [11, 0, 1, 0, 4]
    scene.take(scene.core.process_died(scene.now, "r"))
    assert scene.pool.counts == [15, 0, 0, 1, 0]


def test_a_shared_tail_may_not_be_filled_in_place() -> None:
    scene, runner, _, start, credits = prepared()
    scene.send(runner, StepReport(forked=(Forked(start.start_id, 0, (1,)),), credits_wanted=3))
    scene.send(runner, StepReport(copied=(Copied(start.start_id, 1, 1, credits[0]),), credits_wanted=3))
    filled = tuple(Progress(start.start_id, choice, (choice, choice), 8) for choice in (0, 1))
    scene.send(runner, StepReport(progress=filled, credits_wanted=3))
    assert scene.pool.counts[SEALED] == 3
    assert not scene.ended


def test_filling_a_shared_tail_is_a_fault() -> None:
    scene, runner, _, start, _ = prepared()
    scene.send(runner, StepReport(forked=(Forked(start.start_id, 0, (1,)),), credits_wanted=3))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (2, 2), 8),)))
    assert scene.ended == [runner]


def test_a_child_may_end_in_the_report_of_its_birth() -> None:
    scene, runner, _, start, _ = prepared()
    ended = tuple(Ended(start.start_id, choice, (choice,), 6, "finished") for choice in (0, 1))
    scene.send(runner, StepReport(forked=(Forked(start.start_id, 0, (1,)),), ended=ended))
    assert scene.pool.counts == [11, 3, 0, 2, 0]
    assert not scene.core.state.actives()


def test_a_fork_beyond_the_choices_takes_a_seat() -> None:
    scene, runner, _, start, _ = prepared()
    scene.send(runner, StepReport(forked=(Forked(start.start_id, 0, (1, 5)),)))
    assert scene.core.state.runners[0].seats == 3


def test_credits_describe_their_runner() -> None:
    scene, _, _, _, credits = prepared()
    (holder,) = scene.pool.ledger.holders(credits[0][0])
    assert holder.describe() == "credits of runner 'r' (client 1)"
    assert scene.pool.state[credits[0][0]] == RESERVED
    assert scene.pool.state[15] == FREE
