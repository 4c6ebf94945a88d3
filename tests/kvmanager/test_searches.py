"""Beam searches that go on after their runner's death: what is accepted, and how they start."""

from typing import Any

import msgspec
import pytest

from kvmanager.protocol import (
    Accepted,
    BeamParams,
    BeamPath,
    Choice,
    Draining,
    Ended,
    Fenced,
    Forked,
    Progress,
    Rejected,
    SamplingParams,
    SearchState,
    Start,
    StepReport,
    Submit,
    Taken,
    TokenLogprobs,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene

PROMPT = (1, 2, 3)
OUTPUTS = ((4, 5, 6, 7, 8, 9), (4, 5, 6, 7, 8, 1))
"""Of two beams: with the prompt two full blocks and a token."""


def search(*outputs: tuple[int, ...], ends: tuple[BeamPath, ...] = ()) -> SearchState:
    return SearchState(tuple(BeamPath(output, -1.0) for output in outputs), ends)


def submit(attempt: int, *outputs: tuple[int, ...], max_tokens: int = 20, **changes: Any) -> Submit:
    sampling = SamplingParams(max_tokens, 1, temperature=0.0, beam=BeamParams(len(outputs)))
    choices = tuple(Choice(index, output) for index, output in enumerate(outputs))
    state = search(*outputs) if outputs[0] else None
    message = Submit("a", attempt, 0.0, PROMPT, choices, sampling, search=state)
    return msgspec.structs.replace(message, **changes)


def test_what_a_dead_runners_beams_had_filled_is_found_by_each_of_those_that_go_on() -> None:
    scene = Scene()
    dead, frontend = scene.runner("dead"), scene.frontend()
    start, _ = scene.submit(frontend, dead, submit(0, (), ()))
    assert start.search is None
    fork = StepReport(
        (Progress(start.start_id, 0, (4,), 4),), (Forked(start.start_id, 0, (1,)),), credits_wanted=2
    )
    scene.send(dead, fork)
    first, second = scene.credits(dead)
    taken = (Taken(start.start_id, 0, (first,)), Taken(start.start_id, 1, (second,)))
    scene.send(dead, StepReport(taken=taken))
    filled = tuple(Progress(start.start_id, choice, (5, 6, 7, 8), 8) for choice in range(2))
    scene.send(dead, StepReport(filled))
    scene.take(scene.core.process_died(scene.now, "dead"))
    other = scene.runner("other")
    again, _ = scene.submit(frontend, other, submit(1, *OUTPUTS))
    assert again.search == search(*OUTPUTS)
    assert [(each.choice, each.output_token_ids) for each in again.sequences] == [*enumerate(OUTPUTS)]
    assert [each.num_cached_tokens for each in again.sequences] == [8, 8]
    assert again.sequences[0].block_table[:2] == again.sequences[1].block_table[:2]


LATER = search((*OUTPUTS[0], 2), (*OUTPUTS[1], 2))


def preempted(start: Start, state: SearchState = LATER) -> StepReport:
    """The runner's answer: each beam has got token 2 since."""
    first, second = (Ended(start.start_id, choice, (2,), 9, "preempted") for choice in range(2))
    return StepReport(ended=(msgspec.structs.replace(first, search=state), second))


def test_a_search_that_is_preempted_starts_as_it_did() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submit(1, *OUTPUTS))
    scene.send(runner, preempted(start))
    again = scene.start(runner)
    assert again.start_id > start.start_id
    assert (again.search, len(again.sequences)) == (start.search, 2)


def test_of_a_search_whose_runner_drains_nothing_is_computed_again() -> None:
    scene = Scene()
    draining, other, frontend = scene.runner("draining"), scene.runner("other"), scene.frontend()
    start, _ = scene.submit(frontend, draining, submit(1, *OUTPUTS))
    scene.send(draining, Draining())
    scene.send(draining, preempted(start))
    again = scene.start(other)
    assert again.search == LATER
    assert [each.num_cached_tokens for each in again.sequences] == [9, 9]
    assert [len(each.output_token_ids) for each in again.sequences] == [7, 7]


@pytest.mark.parametrize(
    "state",
    [
        search(),
        search(OUTPUTS[0]),
        search(OUTPUTS[0], *OUTPUTS),
        search((4,) * 20, (5,) * 20),
        search((-1,), (5,)),
        search((1 << 32,), (5,)),
    ],
)
def test_a_runner_that_reports_a_state_that_cannot_be_is_fenced(state: SearchState) -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submit(1, *OUTPUTS))
    scene.send(runner, preempted(start, state))
    assert [type(message) for message in scene.received(runner)] == [Fenced]


def test_a_runner_that_reports_a_state_of_what_is_no_search_is_fenced() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1, 2, 3]))
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (), 3, "finished", search()),)))
    assert [type(message) for message in scene.received(runner)] == [Fenced]


def test_where_beams_that_share_nothing_might_not_fit_the_search_begins_anew() -> None:
    """Two of 24 tokens need six blocks each; the prompt with two beams needed one block less."""
    scene = Scene(num_blocks=11)
    runner, frontend = scene.runner(), scene.frontend()
    prompt, outputs = (1, 2, 3, 4), ((5, 6), (5, 7))
    start, given = scene.submit(frontend, runner, submit(1, *outputs, prompt_token_ids=prompt, max_tokens=21))
    assert start.search is None
    assert start.sequences == (given,)
    assert (given.choice, given.output_token_ids, given.forks) == (0, (), (1,))


END = BeamPath((4, 0), -1.0, finish_reason="stop")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"search": None}, "no state"),
        ({"search": search(*OUTPUTS[::-1])}, "its choices' outputs"),
        ({"search": search(OUTPUTS[0])}, "its choices' outputs"),
        (
            {
                "choices": (Choice(0, (4, 5)), Choice(1, (4,))),
                "search": search((4, 5), (4,)),
            },
            "of one length",
        ),
        ({"choices": (Choice(0, (4,)), Choice(1, (4,))), "search": search((4,), (4,))}, "all different"),
        ({"choices": (Choice(0, (4,)), Choice(2, (5,))), "search": search((4,), (5,))}, "as many choices"),
        ({"sampling": SamplingParams(20, 1)}, "a request that is none"),
        ({"search": search(*OUTPUTS, ends=(END,) * 3)}, "3 ends"),
        ({"search": search(*OUTPUTS, ends=(BeamPath((4, 0), -1.0),))}, "its reason"),
        ({"search": search(*OUTPUTS, ends=(BeamPath((), -1.0, None, "stop"),))}, "no tokens"),
        ({"search": search(*OUTPUTS, ends=(BeamPath((4,), float("nan"), None, "stop"),))}, "finite"),
        (
            {
                "search": search(
                    *OUTPUTS, ends=(BeamPath((4, 0), -1.0, (TokenLogprobs(-1.0, 1, ()),), "stop"),)
                )
            },
            "log-probabilities",
        ),
    ],
)
def test_a_state_that_cannot_be_is_refused(changes: dict[str, Any], word: str) -> None:
    scene = Scene()
    scene.runner()
    frontend = scene.frontend()
    scene.send(frontend, submit(1, *OUTPUTS, **changes))
    (answer,) = scene.received(frontend)
    assert isinstance(answer, Rejected)
    assert (answer.code, word in answer.message) == ("invalid_request", True), answer.message
    scene.send(frontend, submit(1, *OUTPUTS, search=search(*OUTPUTS, ends=(END,))))
    assert scene.received(frontend) == [Accepted("a", 1)]
