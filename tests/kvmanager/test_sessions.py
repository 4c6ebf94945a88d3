"""Hello, death and pressure: who is registered, who dies, and who gives way when blocks run out."""

from typing import Any

import msgspec
import pytest

from kvmanager.pool.block_pool import CACHED, FREE, RESERVED
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Choice,
    Ended,
    FrontendHello,
    Layout,
    Progress,
    Refused,
    RunnerHello,
    RunnerLost,
    SamplingParams,
    StepReport,
    Submit,
    Taken,
)
from kvmanager.scheduling.clients import Frontend
from tests.kvmanager.fake_clients import LAYOUT, submission
from tests.kvmanager.scene import Scene


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        (FrontendHello(99, "f", "f", "e"), "version", ["99", str(PROTOCOL_VERSION)]),
        (RunnerHello(PROTOCOL_VERSION, "r", "r", LAYOUT, 0, 9), "invalid_request", ["max_num_seqs"]),
        (
            RunnerHello(PROTOCOL_VERSION, "r", "r", Layout("other", "float16", 4, 1, 1, 2), 1, 9),
            "other_layout",
            ["model fingerprint there and other here", "dtype float32 there and float16 here", "reset_pool"],
        ),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused(hello: Any, code: str, words: list[str]) -> None:
    scene = Scene()
    answer, effects = scene.core.hello(0.0, hello)
    assert isinstance(answer, Refused)
    assert answer.code == code
    assert [word for word in words if word not in answer.message] == []
    assert not effects.messages
    assert not scene.core.state.clients


def test_the_same_hello_again_gets_the_same_session_until_it_was_used() -> None:
    scene = Scene()
    first = scene.frontend()
    assert scene.frontend() == first
    scene.send(first, None)
    second = scene.frontend()
    assert second != first
    assert scene.ended == [first]


def test_a_dead_frontends_requests_are_cancelled() -> None:
    scene = Scene()
    runner, frontend, other = scene.runner(max_num_seqs=1), scene.frontend(), scene.frontend("other")
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 8))
    scene.send(frontend, submission("b", [1] * 8))
    scene.send(other, submission("c", [1] * 8))
    scene.take(scene.core.process_died(0.0, "f"))
    (directives,) = scene.received(runner)
    assert directives.cancels == (start.start_id,)
    scene.end(runner, start, 8, "cancelled")
    assert scene.start(runner).request_id == "c"


def test_a_dead_runners_unsealed_blocks_are_free_and_its_requests_lost() -> None:
    scene = Scene()
    runner, frontend, other = scene.runner(), scene.frontend(), scene.frontend("other")
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 9))
    scene.submit(other, runner, submission("b", [2] * 9))
    cancelled, _ = scene.submit(frontend, runner, submission("c", [3] * 3))
    scene.send(frontend, Cancel("c", 0))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 9),), credits_wanted=2))
    scene.received(frontend)
    scene.received(other)
    scene.take(scene.core.process_died(0.0, "r"))
    assert scene.received(frontend) == [RunnerLost((("a", 0),))]
    assert scene.received(other) == [RunnerLost((("b", 0),))]
    assert (scene.pool.counts[FREE], scene.pool.counts[CACHED]) == (14, 2)
    again = scene.runner("another")
    resumed = Submit("a", 1, 0.0, (1,) * 9, (Choice(0, (5,)),), SamplingParams(4, 1))
    _, sequence = scene.submit(frontend, again, resumed)
    assert (sequence.num_cached_tokens, sequence.output_token_ids) == (8, (5,))
    assert scene.core.state.counters.prefix_cache_queries == 9 + 9 + 3
    assert cancelled.request_id == "c"


def test_a_death_that_nobody_knows_of_is_ignored() -> None:
    scene = Scene()
    scene.take(scene.core.process_died(0.0, "nobody"))
    assert not scene.ended


def crowded() -> tuple[Scene, int, int, list[int]]:
    """Eight blocks, all in use: three requests of 8 tokens in two blocks each, and two credits."""
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    ids = []
    for number, name in enumerate("abc"):
        start, _ = scene.submit(
            frontend, runner, submission(name, [number] * 8, max_tokens=9, arrival=float(number))
        )
        ids.append(start.start_id)
    progress = tuple(Progress(start_id, 0, (), 8) for start_id in ids)
    scene.send(runner, StepReport(progress=progress, credits_wanted=3))
    return scene, runner, frontend, ids


def use_credits(scene: Scene, runner: int, ids: list[int]) -> None:
    """Each of the first sequences takes one of the runner's credits; more are wanted."""
    credits = scene.credits(runner)
    taken = tuple(Taken(start_id, 0, (ref,)) for start_id, ref in zip(ids, credits, strict=False))
    scene.send(runner, StepReport(taken=taken, credits_wanted=1))


def test_the_latest_request_gives_way_and_waits_with_its_output() -> None:
    scene, runner, frontend, ids = crowded()
    assert scene.pool.available == 0
    use_credits(scene, runner, ids)
    (directives,) = scene.received(runner)
    assert directives.preempts == (ids[2],)
    scene.send(runner, StepReport(credits_wanted=1))
    assert not scene.received(runner)
    scene.send(runner, StepReport(ended=(Ended(ids[2], 0, (7,), 8, "preempted"),), credits_wanted=1))
    assert len(scene.credits(runner)) == 1
    (waiting,) = scene.core.state.waiting
    assert (waiting.submit.request_id, waiting.groups[0].output) == ("c", (7,))
    assert scene.core.state.counters.preemptions == 1
    for start_id in ids[:2]:
        scene.send(runner, StepReport(ended=(Ended(start_id, 0, (), 8, "finished"),), credits_wanted=0))
    start = scene.start(runner)
    assert (start.request_id, start.sequences[0].output_token_ids) == ("c", (7,))
    scene.end(runner, start, 9)
    assert not [message for message in scene.received(frontend) if not isinstance(message, Accepted)]


def test_a_preempted_request_that_is_cancelled_does_not_come_back() -> None:
    scene, runner, frontend, ids = crowded()
    use_credits(scene, runner, ids)
    scene.received(runner)
    scene.send(frontend, Cancel("c", 0))
    assert not scene.received(runner)
    scene.send(runner, StepReport(ended=(Ended(ids[2], 0, (), 8, "preempted"),)))
    assert not len(scene.core.state.waiting)


def test_a_request_whose_output_is_complete_does_not_come_back() -> None:
    scene, runner, _, ids = crowded()
    use_credits(scene, runner, ids)
    scene.send(runner, StepReport(ended=(Ended(ids[2], 0, (7,) * 9, 8, "preempted"),)))
    assert not len(scene.core.state.waiting)


def test_a_preempted_request_asks_for_room_beyond_its_own() -> None:
    scene, runner, _, ids = crowded()
    use_credits(scene, runner, ids)
    scene.send(runner, StepReport(ended=(Ended(ids[2], 0, (), 8, "preempted"),)))
    # One block is free and two are cached: enough for two blocks, not for two more running sequences.
    assert scene.pool.available == 2
    assert len(scene.core.state.waiting) == 1


def test_a_silent_runner_is_not_waited_for() -> None:
    scene = Scene(6)
    quiet, frontend = scene.runner("quiet", max_num_seqs=1), scene.frontend()
    scene.submit(frontend, quiet, submission("z", [9] * 8, max_tokens=2, arrival=9.0))
    scene.now = 5.0
    loud = scene.runner("loud")
    ids = []
    for name in "ab":
        scene.send(frontend, submission(name, [ord(name)] * 8, max_tokens=2))
    ids = [start.start_id for message in scene.received(loud) for start in message.starts]
    assert len(ids) == 2
    scene.send(loud, StepReport(credits_wanted=1))
    (directives,) = scene.received(loud)
    assert directives.preempts == (ids[1],)
    assert not [message for message in scene.received(quiet) if message.preempts]


def test_the_only_running_request_is_not_preempted() -> None:
    scene = Scene(2)
    runner, frontend = scene.runner(), scene.frontend()
    scene.submit(frontend, runner, submission("a", [1] * 7, max_tokens=2))
    scene.send(runner, StepReport(credits_wanted=1))
    assert not scene.received(runner)


def test_the_watermark_keeps_room_while_others_run() -> None:
    scene = Scene(10, watermark=0.5)
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 12))
    scene.send(frontend, submission("b", [2] * 12))
    assert len(scene.core.state.waiting) == 1
    scene.end(runner, start, 12)
    assert scene.start(runner).request_id == "b"


def test_a_start_leaves_room_for_what_runs_to_grow() -> None:
    """Both may come to 24 tokens: two blocks more each, before the first gives any back."""
    waiting = []
    for num_blocks in (11, 10):
        scene = Scene(num_blocks, growth_room=1.0)
        scene.runner()
        frontend = scene.frontend()
        for name, token in (("a", 1), ("b", 2)):
            scene.send(frontend, submission(name, [token] * 14, max_tokens=6))
        waiting.append(len(scene.core.state.waiting))
    assert waiting == [0, 1]


def test_room_for_growth_is_what_is_usual_and_limited() -> None:
    """Those who say 80 tokens and have had 8 are expected to have 8; never more than a share is kept free."""
    scene = Scene(40, growth_room=1.0)
    runner, frontend = scene.runner(), scene.frontend()
    for number in range(100):
        start, _ = scene.submit(frontend, runner, submission(f"r{number}", [1] * 8, max_tokens=80))
        scene.end(runner, start, 8, new=(2,) * 8)
    for name in ("a", "b", "c"):
        scene.send(frontend, submission(name, [ord(name)] * 8, max_tokens=80))
    assert not len(scene.core.state.waiting)
    limited = Scene(40, growth_room=0.5)
    limited.runner()
    frontend = limited.frontend()
    for name in ("a", "b", "c"):
        limited.send(frontend, submission(name, [ord(name)] * 8, max_tokens=80))
    assert not len(limited.core.state.waiting)


def test_choices_that_have_gone_apart_run_in_turns_where_they_do_not_fit_together() -> None:
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    choices = (Choice(0, (5,)), Choice(1, (6,)))
    start, _ = scene.submit(
        frontend, runner, Submit("a", 0, 0.0, (1,) * 8, choices, SamplingParams(10, 1), read_cache=False)
    )
    assert [sequence.choice for sequence in start.sequences] == [0]
    scene.end(runner, start, 9)
    again = scene.start(runner)
    assert [sequence.choice for sequence in again.sequences] == [1]
    scene.end(runner, again, 9)
    assert not scene.core.state.actives()
    assert scene.pool.counts[RESERVED] == 0


def test_what_is_gone_is_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.scheduling.clients.MAX_REMEMBERED", 2)
    monkeypatch.setattr("kvmanager.pool.invariants.MAX_REMEMBERED", 2)
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    for name in "abc":
        scene.run(frontend, runner, submission(name, [1]))
    (client,) = (each for each in scene.core.state.clients.values() if isinstance(each, Frontend))
    assert [*client.gone] == ["b", "c"]
    scene.run(frontend, runner, msgspec.structs.replace(submission("b", [1]), attempt=1))
    scene.run(frontend, runner, submission("d", [1]))
    assert [*client.gone] == ["b", "d"], "the last to end is kept, whenever an attempt of it ended before"
