"""Submits and cancels by example: what is accepted, replaced, refused, and what waits."""

import math

import msgspec
import pytest

from kvmanager.messages.sampling_params import RANGES
from kvmanager.pool.block_pool import CACHED, FREE
from kvmanager.protocol import (
    Accepted,
    BeamParams,
    Cancel,
    Choice,
    Ended,
    Rejected,
    SamplingParams,
    StatsQuery,
    StepReport,
    Submit,
    find_sampling_fault,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene


def sampled(**params: object) -> Submit:
    """A submission with these sampling parameters."""
    sampling = msgspec.structs.replace(SamplingParams(4, 1), **params)
    return msgspec.structs.replace(submission("a", [1]), sampling=sampling)


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
def test_each_sampling_parameter_has_the_range_that_its_refusal_names(
    name: str, low: float, high: float
) -> None:
    inside = [value for value in (low, high) if math.isfinite(value)]
    for value in (*inside, low - 1, high + 1, math.nan):
        fault = find_sampling_fault(sampled(**{name: value}).sampling)
        told = "" if value in inside else f"{name} is {value}, want a number from {low} to {high}"
        assert fault == told


def test_submits_are_idempotent_and_a_higher_attempt_replaces() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    message = submission("a", [1] * 3)  # no full block, for which the newer one would wait
    start, _ = scene.submit(frontend, runner, message)
    scene.send(frontend, message)
    assert scene.received(frontend) == [Accepted("a", 0)] * 2
    assert not scene.received(runner)
    newer = Submit("a", 1, 0.0, (1, 1, 1), (Choice(0, (2,)),), SamplingParams(4, 1))
    scene.send(frontend, newer)
    (directives,) = scene.received(runner)
    assert directives.cancels == (start.start_id,)
    assert [started.attempt for started in directives.starts] == [1]
    scene.send(frontend, message)
    assert len(scene.core.state.actives()) == 2
    scene.end(runner, start, 3, "cancelled")
    (active,) = scene.core.state.actives()
    assert active.request.submit.attempt == 1
    scene.send(runner, StepReport(ended=(Ended(active.start_id, 0, (), 4, "finished"),)))
    scene.send(frontend, newer)
    assert not scene.core.state.actives()
    assert not len(scene.core.state.waiting)


def test_a_cancel_names_its_attempt_and_blocks_wait_for_the_acknowledgement() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 10))
    scene.send(frontend, Cancel("a", 7))
    scene.send(frontend, Cancel("unknown", 0))
    assert not scene.received(runner)
    scene.send(frontend, Cancel("a", 0))
    (directives,) = scene.received(runner)
    assert directives.cancels == (start.start_id,)
    assert scene.pool.counts[FREE] == 13
    scene.end(runner, start, 10, "cancelled")
    assert (scene.pool.counts[FREE], scene.pool.counts[CACHED]) == (13, 3)


def test_a_waiting_request_can_be_cancelled() -> None:
    scene = Scene()
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.submit(frontend, runner, submission("a", [1]))
    scene.send(frontend, submission("b", [1]))
    assert len(scene.core.state.waiting) == 1
    scene.send(frontend, Cancel("b", 0))
    assert not len(scene.core.state.waiting)


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (
            submission("a", [1] * 60, max_tokens=9),
            "can_never_fit",
            ["17 blocks of 4", "60 prompt", "max_tokens 9", "has 16"],
        ),
        (submission("a", [1] * 20, max_tokens=31), "can_never_fit", ["20", "31", "51", "50"]),
        (submission("a", [1], n=9), "can_never_fit", ["9 choices", "8 sequences"]),
        (submission("", [1]), "invalid_request", ["request_id"]),
        (submission("x" * 129, [1]), "invalid_request", ["129"]),
        (submission("a", [1], salt="s" * 4097), "invalid_request", ["4097"]),
        (submission("a", []), "invalid_request", ["0 tokens"]),
        (submission("a", [-1]), "invalid_request", ["negative"]),
        (submission("a", [1 << 32]), "invalid_request", ["32 bits"]),
        (submission("a", [1], n=0), "invalid_request", ["0 choices"]),
        (submission("a", [1], n=129), "invalid_request", ["129 choices"]),
        (submission("a", [1], max_tokens=0), "invalid_request", ["max_tokens is 0"]),
        (submission("a", [1], arrival=float("nan")), "invalid_request", ["nan"]),
        (sampled(temperature=float("nan")), "invalid_request", ["temperature is nan"]),
        (sampled(temperature=-1.0), "invalid_request", ["temperature is -1.0"]),
        (sampled(temperature=float("inf")), "invalid_request", ["temperature is inf"]),
        (sampled(top_p=1.5), "invalid_request", ["top_p is 1.5"]),
        (sampled(top_k=-1), "invalid_request", ["top_k is -1"]),
        (sampled(seed=-1), "invalid_request", ["seed is -1"]),
        (sampled(repetition_penalty=0.0), "invalid_request", ["repetition_penalty is 0.0"]),
        (sampled(logprobs=100_000), "invalid_request", ["logprobs is 100000"]),
        (sampled(prompt_logprobs=-1), "invalid_request", ["prompt_logprobs is -1"]),
        (sampled(logit_bias={1: float("inf")}), "invalid_request", ["logit_bias"]),
        (sampled(logit_bias={-1: 1.0}), "invalid_request", ["logit_bias has a token id"]),
        (sampled(stop_token_ids=(1 << 32,)), "invalid_request", ["stop_token_ids has a token id"]),
        (sampled(beam=BeamParams(1, float("nan"))), "invalid_request", ["length_penalty"]),
        (msgspec.structs.replace(submission("a", [1]), attempt=-1), "invalid_request", ["attempt -1"]),
        (
            Submit("a", 0, 0.0, (1,), (Choice(0), Choice(0)), SamplingParams(1, 1)),
            "invalid_request",
            ["different"],
        ),
        (Submit("a", 0, 0.0, (1,), (Choice(-1),), SamplingParams(1, 1)), "invalid_request", ["-1"]),
        (
            Submit("a", 0, 0.0, (1,), (Choice(0, (1, 2)),), SamplingParams(2, 1)),
            "invalid_request",
            ["output so far"],
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(message: Submit, code: str, words: list[str]) -> None:
    scene = Scene()
    scene.runner(max_model_len=50 if "can" in code and message.sampling.max_tokens == 31 else 1000)
    frontend = scene.frontend()
    scene.send(frontend, message)
    (answer,) = scene.received(frontend)
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after) == (code, 0.0)
    assert [word for word in words if word not in answer.message] == []
    assert scene.core.state.counters.rejected == 1


def test_a_request_that_just_fits_is_taken() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 60, max_tokens=5))
    assert start.request_id == "a"


def test_a_full_queue_refuses_new_requests_but_not_resumed_ones() -> None:
    scene = Scene(max_waiting=1)
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.submit(frontend, runner, submission("a", [1]))
    scene.send(frontend, submission("b", [1]))
    scene.received(frontend)
    scene.send(frontend, submission("c", [1]))
    (answer,) = scene.received(frontend)
    assert (answer.code, answer.retry_after > 0) == ("queue_full", True)
    scene.send(frontend, Submit("d", 1, 0.0, (1,), (Choice(0, (2,)),), SamplingParams(4, 1)))
    assert scene.received(frontend) == [Accepted("d", 1)]


def test_without_a_pool_nothing_is_ready() -> None:
    scene = Scene(0)
    frontend = scene.frontend()
    scene.send(frontend, submission("a", [1]))
    (answer,) = scene.received(frontend)
    assert (answer.code, answer.retry_after > 0) == ("not_ready", True)
    scene.send(frontend, StatsQuery(3))
    (stats,) = scene.received(frontend)
    assert (stats.pool.num_blocks, stats.runners, stats.rejected) == (0, (), 1)


def test_without_a_runner_requests_wait_for_a_while() -> None:
    scene = Scene(runner_wait=10.0)
    frontend = scene.frontend()
    scene.send(frontend, submission("a", [1]))
    assert scene.received(frontend) == [Accepted("a", 0)]
    scene.take(scene.core.tick(9.0))
    assert not scene.received(frontend)
    scene.take(scene.core.tick(10.0))
    (answer,) = scene.received(frontend)
    assert (answer.request_id, answer.code) == ("a", "not_ready")
    scene.now = 10.0
    scene.send(frontend, submission("b", [1]))
    (answer,) = scene.received(frontend)
    assert (answer.request_id, answer.code) == ("b", "not_ready")
    runner = scene.runner()
    scene.submit(frontend, runner, submission("c", [1]))
    scene.now = 100.0
    scene.send(runner, None)
    scene.take(scene.core.tick(100.0))
    assert scene.core.state.last_runner_seen == 100.0


def test_behind_a_runner_that_stands_still_requests_wait_for_a_while() -> None:
    scene = Scene(runner_wait=10.0)
    runner, frontend = scene.runner(max_num_seqs=1), scene.frontend()
    scene.submit(frontend, runner, submission("a", [1]))
    scene.send(frontend, submission("b", [1]))
    scene.now = 9.0
    scene.send(runner, None)
    scene.received(frontend)
    scene.take(scene.core.tick(18.9))
    assert not scene.received(frontend)
    scene.take(scene.core.tick(19.0))
    (answer,) = scene.received(frontend)
    assert (answer.request_id, answer.code) == ("b", "not_ready")
    assert "made progress, for 10 s" in answer.message
    assert scene.core.state.actives()  # it may go on


def test_a_waiting_request_that_no_runner_takes_is_refused_when_one_comes() -> None:
    scene = Scene()
    frontend = scene.frontend()
    scene.send(frontend, submission("a", [1] * 20))
    scene.runner(max_model_len=10)
    assert [answer.code for answer in scene.received(frontend)[1:]] == ["can_never_fit"]
