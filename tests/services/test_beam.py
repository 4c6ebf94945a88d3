"""Beam search over HTTP: what is asked of the manager, what is shown, what is refused."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvmanager.protocol import MAX_BEAMS, BeamParams
from tests.services.fake_stack import Stack, events, says, wait_until

BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 20, "use_beam_search": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "use_beam_search": True}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        stack.manager.script = says(" best", " second", " third")
        yield stack


def post(stack: Stack, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{stack.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/v1/{path}", json=body)
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_parameters_reach_the_manager(stack: Stack) -> None:
    post(stack, "completions", {**BODY, "n": 3, "length_penalty": 0.6, "early_stopping": "never"})
    submit = stack.manager.submits[-1]
    assert submit.sampling.beam == BeamParams(3, 0.6, "never")
    assert submit.sampling.temperature == 0
    assert [choice.index for choice in submit.choices] == [0, 1, 2]


def test_defaults_are_those_of_transformers(stack: Stack) -> None:
    post(stack, "chat/completions", {**CHAT, "n": 2})
    assert stack.manager.submits[-1].sampling.beam == BeamParams(2, 1.0, False)


def test_choices_come_best_first_with_their_scores(stack: Stack) -> None:
    choices = post(stack, "completions", {**BODY, "n": 2})["choices"]
    shown = [(c["index"], c["text"], c["cumulative_logprob"], c["beam_score"]) for c in choices]
    assert shown == [(0, " best", -1.0, -0.5), (1, " second", -2.0, -1.5)]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_of_best_of_beams_n_are_shown(stack: Stack, path: str) -> None:
    body = BODY if path == "completions" else CHAT
    choices = post(stack, path, {**body, "n": 2, "best_of": 3})["choices"]
    assert stack.manager.submits[-1].sampling.beam == BeamParams(3)
    assert [choice["beam_score"] for choice in choices] == [-0.5, -1.5]


def test_other_requests_show_no_score(stack: Stack) -> None:
    choice = post(stack, "completions", {"prompt": "Once", "use_beam_search": False})["choices"][0]
    assert "beam_score" not in choice
    assert "cumulative_logprob" not in choice
    assert stack.manager.submits[-1].sampling.beam is None


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_has_each_choice_in_one_piece(stack: Stack, path: str) -> None:
    body = {**(BODY if path == "completions" else CHAT), "n": 2, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/{path}", json=body) as answer:
        chunks = [chunk["choices"][0] for chunk in events(answer.iter_lines())]
    texts = [c.get("text") or c.get("delta", {}).get("content") for c in chunks]
    assert [text for text in texts if text] == [" best", " second"]
    assert {c["index"]: c["beam_score"] for c in chunks if c["finish_reason"]} == {0: -0.5, 1: -1.5}


def test_a_search_starts_over_when_its_runner_dies(stack: Stack) -> None:
    stack.hold()
    before = len(stack.manager.submits)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, stack, "completions", {**BODY, "n": 2})
        wait_until(lambda: len(stack.manager.submits) > before, "the request")
        stack.do(stack.manager.lose_runner)
        stack.go_on()
        choices = answer.result()["choices"]
    first, second = stack.manager.submits[before:]
    assert [choice["text"] for choice in choices] == [" best", " second"]
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.choices == first.choices
    assert second.sampling == first.sampling


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop": ["x"]}, "stop"),
        ({"n": MAX_BEAMS + 1}, "n"),
        ({"best_of": MAX_BEAMS + 1}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": None, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_does_not_fit_is_refused_by_name(
    stack: Stack, path: str, changes: dict[str, Any], param: str
) -> None:
    body = BODY if path == "completions" else CHAT
    assert refusal(stack, path, {**body, **changes})["param"] == param


def test_no_tokens_are_no_search(stack: Stack) -> None:
    assert refusal(stack, "completions", {**BODY, "max_tokens": 0, "echo": True})["param"] == "max_tokens"


def test_best_of_in_a_chat_needs_a_search(stack: Stack) -> None:
    body = {**CHAT, "use_beam_search": False, "best_of": 2}
    assert refusal(stack, "chat/completions", body)["param"] == "best_of"
