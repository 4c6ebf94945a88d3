"""What is no message, or a message that cannot be meant, changes nothing for anybody else."""

from random import Random

import msgspec
import zmq

from kvmanager.client import manager_endpoint
from kvmanager.protocol import (
    MAX_FRAME_BYTES,
    BeamParams,
    BeamPath,
    Cancel,
    Choice,
    Ended,
    PinsQuery,
    Progress,
    Ready,
    SamplingParams,
    SearchState,
    StatsQuery,
    StepReport,
    Submit,
    Taken,
    Unpin,
    decode_to_manager,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene
from tests.kvmanager.test_server import DEADLINE, Daemon, stats_when
from tests.kvmanager.test_server import daemon as daemon
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
    Submit(
        "d",
        1,
        1.0,
        (1, 2),
        (Choice(0, (5,)), Choice(1, (6,))),
        SamplingParams(3, 1, beam=BeamParams(2)),
        search=SearchState(
            (BeamPath((5,), -1.0), BeamPath((6,), -2.0)), (BeamPath((0,), -3.0, None, "stop"),)
        ),
    ),
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


def test_noise_and_a_giant_on_the_real_socket_are_dropped_and_counted(daemon: Daemon) -> None:
    random = Random(7)
    with daemon.runner(), daemon.frontend() as frontend, zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(manager_endpoint(daemon.directory))
        messages = FROM_FRONTENDS + FROM_RUNNERS
        noise = [*confused(messages, random, 100), *torn(messages, random, 100), deep(100_000)]
        for body in noise:
            stranger.send_multipart([b"", body])
        stranger.send_multipart([b""] * 50)
        stats_when(frontend, lambda stats: stats.dropped_messages == len(noise) + 1)
        stranger.send_multipart([b"", bytes(MAX_FRAME_BYTES + 1)])  # this connection ends with it
        stranger.send_multipart([b"unknown", b""])
        assert stranger.poll(int(DEADLINE * 1000)), "the stranger's next connection is served"
        assert stats_when(frontend, lambda stats: True).dropped_messages == len(noise) + 1
        assert len(stats_when(frontend, lambda stats: True).runners) == 1
        stranger.close()
