"""Every refusal: its status, OpenAI's shape, the field's name; and no body that makes a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.protocol import Rejected
from services.api.openai_types import REFUSED, ChatRequest, CompletionRequest
from tests.services.fake_stack import Stack, says, wait_until

LIMIT = 20_000


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(max_body_bytes=LIMIT, request_log=False) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.manager.script = says("ok")
    shared.manager.reject = lambda submit: None
    return shared


@pytest.fixture(scope="module")
def http(shared: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=20) as client:
        yield client


def error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    result: dict[str, Any] = body
    return result


def refused(http: httpx.Client, fields: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    base: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    return error(http.post(path, json={**base, **fields}))


WRONG_VALUES: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("n", 0),
    ("n", 129),
    ("best_of", 0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 9e-7),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 1 << 64),
    ("priority", 1 << 40),
    ("stop", ["a"] * 17),
    ("stop", ""),
    ("stop", "x" * 2000),
    ("stop_token_ids", [10**9]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"999999": 1}),
    ("cache_salt", ""),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", [1, "x"]),
    ("prompt", [-1]),
    ("prompt", ["x"] * 257),
]


@pytest.mark.parametrize(
    ("name", "value"), WRONG_VALUES, ids=[f"{n}={json.dumps(v)[:20]}" for n, v in WRONG_VALUES]
)
def test_values_out_of_range_name_the_field(stack: Stack, http: httpx.Client, name: str, value: Any) -> None:
    body = refused(http, {name: value})
    assert body["param"] == name
    assert body["type"] == "invalid_request_error"
    assert name in body["message"] or "prompt" in body["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_wrong_types_name_the_path(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(http, fields)["param"] == param


def test_missing_fields_are_named(http: httpx.Client) -> None:
    assert error(http.post("/v1/completions", json={}))["param"] == "prompt"
    assert error(http.post("/v1/chat/completions", json={}))["param"] == "messages"
    assert error(http.post("/detokenize", json={}))["param"] == "tokens"


@pytest.mark.parametrize("name", REFUSED)
def test_known_but_unsupported_fields_are_refused_by_name(http: httpx.Client, name: str) -> None:
    path = "/v1/completions" if name in CompletionRequest.__struct_fields__ else "/v1/chat/completions"
    body = refused(http, {name: {"type": "something"}}, path)
    assert (body["param"], body["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "use_beam_search": False},
        {
            "modalities": ["text"],
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
        },
        {"functions": None, "parallel_tool_calls": True, "max_completion_tokens": 5, "max_tokens": 5},
    ],
)
def test_neutral_values_are_accepted(stack: Stack, http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_wrong_messages_name_their_path(http: httpx.Client, message: dict[str, Any], param: str) -> None:
    body = error(http.post("/v1/chat/completions", json={"messages": [message]}))
    assert body["param"].replace("[...]", "[0]") == param


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b'"x"', b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     b'{"prompt":"x","temperature":Infinity}', b'{"prompt":"x","temperature":1e999}', b"[" * 9000,
     b'{"prompt":"x","metadata":' + b'{"a":' * 3000, b'{"prompt":"x","tools":' + b"[" * 9000, b"\x00" * 100,
     b'{"prompt":"x","n":' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx.Client, data: bytes) -> None:
    error(http.post("/v1/completions", content=data))


def test_context_overflow_has_the_numbers(stack: Stack, http: httpx.Client) -> None:
    limit = stack.model.max_model_len
    body = refused(http, {"max_tokens": limit})
    assert (body["param"], body["code"]) == ("max_tokens", "context_length_exceeded")
    assert str(limit) in body["message"]
    assert str(limit + 1) in body["message"]
    body = error(http.post("/v1/completions", json={"prompt": [1] * limit}))
    assert (body["param"], body["code"]) == ("prompt", "context_length_exceeded")


def test_combinations(http: httpx.Client) -> None:
    assert refused(http, {"stream_options": {}})["param"] == "stream_options"
    assert refused(http, {"n": 2, "best_of": 1})["param"] == "best_of"
    assert refused(http, {"n": 1, "best_of": 2, "stream": True})["param"] == "best_of"
    assert refused(http, {"prompt_logprobs": 1, "stream": True})["param"] == "prompt_logprobs"
    chat = "/v1/chat/completions"
    assert refused(http, {"top_logprobs": 2}, chat)["param"] == "top_logprobs"
    assert (
        refused(http, {"max_tokens": 1, "max_completion_tokens": 2}, chat)["param"] == "max_completion_tokens"
    )
    assert refused(http, {"chat_template_kwargs": {"messages": 1}}, chat)["param"] == "chat_template_kwargs"


def test_another_model_is_404(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"})
    assert error(answer, 404)["code"] == "model_not_found"


def test_routing_errors_have_the_shape(http: httpx.Client) -> None:
    assert error(http.get("/nothing"), 404)["code"] == "not_found"
    answer = http.get("/v1/completions")
    assert error(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert http.head("/health").status_code == 200


def test_body_limit(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * LIMIT}).encode()
    assert error(http.post("/v1/completions", content=body), 413)["code"] == "request_too_large"
    chunked = http.post("/v1/completions", content=iter([body[:100], body[100:]]))
    assert error(chunked, 413)["code"] == "request_too_large"
    assert http.post("/v1/completions", json={"prompt": "still served"}).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [("can_never_fit", 400, 0.0), ("queue_full", 503, 3.0), ("other", 500, 0.0)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_managers_refusals(
    stack: Stack, http: httpx.Client, code: str, status: int, retry_after: float, stream: bool
) -> None:
    stack.manager.reject = lambda s: Rejected(s.request_id, s.attempt, code, "needs 99 blocks", retry_after)
    answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert "99 blocks" in error(answer, status)["message"]
    assert answer.headers.get("retry-after") == ("3" if status == 503 else None)


def _value() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    return st.recursive(
        plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
    )


@settings(max_examples=100)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    names=st.lists(
        st.sampled_from([*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__]), max_size=4
    ),
    data=st.data(),
)
def test_no_json_makes_a_server_error(
    shared: Stack, http: httpx.Client, path: str, names: list[str], data: st.DataObject
) -> None:
    shared.manager.reject = lambda submit: None
    body: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    if path != "/tokenize":
        del body["messages" if path == "/v1/completions" else "prompt"]
    body.update({name: data.draw(_value(), label=name) for name in names})
    answer = http.post(path, content=json.dumps(body).encode())
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200 and not answer.text.startswith("data:"):
        error(answer, answer.status_code)


@settings(max_examples=60)
@given(body=st.binary(max_size=200))
def test_no_bytes_make_a_server_error(http: httpx.Client, body: bytes) -> None:
    assert 400 <= http.post("/v1/chat/completions", content=body).status_code < 500


def test_a_bug_is_a_500_that_says_whose_it_is(
    stack: Stack, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(stack.model), "check_name", lambda model, name: 1 / 0)
    body = error(http.post("/v1/completions", json={"prompt": "x"}), 500)
    assert (body["type"], body["code"]) == ("server_error", "internal")
    assert "division" not in body["message"]


def test_nothing_is_left_running(stack: Stack) -> None:
    wait_until(lambda: stack.manager.running == 0, "nothing running")
