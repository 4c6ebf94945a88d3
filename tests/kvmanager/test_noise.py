"""What is no message, or a message that cannot be meant, changes nothing for anybody else."""

from random import Random

import msgspec

from kvmanager.protocol import (
    BeamParams,
    Cancel,
    Choice,
    Ended,
    PinsQuery,
    Progress,
    Ready,
    SamplingParams,
    StatsQuery,
    StepReport,
    Submit,
    Taken,
    Unpin,
    decode_to_manager,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene
from tests.noise import confused, deep, torn

FROM_FRONTENDS = [
    submission("a", [1] * 9, n=2),
    Submit(
        "b",
        0,
        1.0,
        (1, 2, 3, 4, 5),
        (Choice(0, (1,)), Choice(1, (2, 3))),
        SamplingParams(5, 1, logit_bias={3: 1.0}, stop_token_ids=(1, 2), logprobs=2),
        -1,
        "salt",
        False,
    ),
    Submit("c", 0, 1.0, (1, 2), (Choice(0), Choice(1)), SamplingParams(3, 1, beam=BeamParams(2))),
    Cancel("a", 0),
    StatsQuery(3),
    PinsQuery(4),
    Unpin(5, "p"),
]
FROM_RUNNERS = [
    Ready(),
    StepReport(
        progress=(Progress(1, 0, (1,), 9),),
        ended=(Ended(1, 0, (1, 2), 9, "finished"),),
        taken=(Taken(1, 0, ((1, 1),)),),
        returned=((2, 1),),
        credits_wanted=3,
        sources_read=((1, 0),),
    ),
]


def test_no_message_of_odd_parts_breaks_the_core_or_what_it_holds() -> None:
    """From a frontend and a runner, with a full audit after each; the others' request goes on and ends."""
    random = Random(5)
    scene = Scene(num_blocks=40)
    good, bad, runner = scene.frontend("good"), scene.frontend("bad"), scene.runner("r")
    taken = 0
    scene.send(good, submission("mine", [7] * 9))
    start = scene.start(runner)
    messages = FROM_FRONTENDS + FROM_RUNNERS
    for body in (*confused(messages, random, 2000), *torn(messages, random, 1000), deep(100_000)):
        try:
            message = decode_to_manager(body)
        except (msgspec.DecodeError, RecursionError):
            continue
        taken += 1
        scene.send(bad, message)
    assert taken > 200
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (1, 2, 3, 4), 12, "finished"),)))
    requests = scene.core.state.clients[good].requests  # type: ignore[union-attr]
    assert not requests


def test_a_runner_that_reports_odd_things_is_fenced_and_no_block_is_lost() -> None:
    random = Random(6)
    scene = Scene(num_blocks=40)
    frontend = scene.frontend()
    for number, body in enumerate(confused(FROM_RUNNERS, random, 400)):
        try:
            message = decode_to_manager(body)
        except msgspec.DecodeError:
            continue
        runner = scene.runner(f"r{number}")
        scene.send(frontend, submission(f"q{number}", [number] * 9))
        scene.send(runner, message)
        scene.take(scene.core.process_died(scene.now, f"r{number}"))
    assert scene.pool.statistics().reserved == scene.pool.statistics().quarantined == 0
