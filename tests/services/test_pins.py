"""/kv/pins over real HTTP, with a fake manager behind a real socket."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmanager.protocol import Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from tests.services.fake_stack import Stack


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """Its manager keeps two blocks of whatever is pinned."""
    shared.manager.pin_messages.clear()
    shared.manager.pins = lambda message: PinsAnswer(
        message.query_id,
        (Pinned("other", 1, 16, 5.0), Pinned(getattr(message, "name", "p"), 2, 32, 59.99951)),
        3,
        25,
    )
    return shared


def post(stack: Stack, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/kv/pins", json={"name": "p", "prompt": "Hello", **body}, timeout=20)


def test_a_pin_is_sent_as_the_completion_routes_tokenise(stack: Stack) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    shown = httpx.post(f"{stack.url}/tokenize", json={"prompt": "Hello"}, timeout=20).json()["tokens"]
    chat = httpx.post(f"{stack.url}/tokenize", json={"messages": messages}, timeout=20).json()["tokens"]
    answer = post(stack, ttl=60, cache_salt="s")
    assert answer.json() == {"name": "p", "blocks": 2, "tokens": 32, "expires_in": 60.0}
    post(stack, prompt=[1, 2, 3])
    post(stack, prompt=None, messages=messages)
    sent = [(m.token_ids, m.cache_salt, m.ttl) for m in stack.manager.pin_messages if isinstance(m, Pin)]
    assert sent == [(tuple(shown), "s", 60.0), ((1, 2, 3), "", 3600.0), (tuple(chat), "", 3600.0)]


def test_pins_are_listed_and_removed(stack: Stack) -> None:
    listed = httpx.get(f"{stack.url}/kv/pins", timeout=20).json()
    assert listed == {
        "object": "list",
        "data": [
            {"name": "other", "blocks": 1, "tokens": 16, "expires_in": 5.0},
            {"name": "p", "blocks": 2, "tokens": 32, "expires_in": 60.0},
        ],
        "pinned_blocks": 3,
        "budget_blocks": 25,
    }
    assert httpx.delete(f"{stack.url}/kv/pins", params={"name": "a b"}, timeout=20).status_code == 200
    query, unpin = stack.manager.pin_messages
    assert isinstance(query, PinsQuery)
    assert isinstance(unpin, Unpin)
    assert unpin.name == "a b"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"name": ""}, "name", "invalid_value"),
        ({"name": "a\n"}, "name", "invalid_value"),
        ({"name": "a" * 129}, "name", "invalid_value"),
        ({"ttl": 0.5}, "ttl", "invalid_value"),
        ({"ttl": 1e9}, "ttl", "invalid_value"),
        ({"cache_salt": ""}, "cache_salt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [1] * 10000}, "prompt", "context_length_exceeded"),
        ({"prompt": ["a"]}, "prompt[0]", "invalid_type"),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
    ],
)
def test_wrong_bodies_name_the_field(stack: Stack, body: dict[str, Any], param: str, code: str) -> None:
    answer = post(stack, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert stack.manager.pin_messages == []


def test_another_model_and_a_missing_name_are_refused(stack: Stack) -> None:
    assert post(stack, model="other").status_code == 404
    answer = httpx.delete(f"{stack.url}/kv/pins", timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")


@pytest.mark.parametrize(
    ("code", "status"), [("not_found", 404), ("not_cached", 409), ("pin_budget", 409), ("pin_busy", 503)]
)
def test_the_managers_refusals_become_http(stack: Stack, code: str, status: int) -> None:
    stack.manager.pins = lambda message: PinsAnswer(message.query_id, (), 0, 25, code, "why")
    answer = post(stack)
    assert answer.status_code == status
    assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == (code, "why")
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_manager_that_is_absent_is_said() -> None:
    with Stack(manager=False) as stack:
        answer = post(stack)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "manager_absent")


def test_a_key_is_asked_for_where_keys_are_set() -> None:
    with Stack(api_keys="secret", host="0.0.0.0") as stack:
        assert post(stack).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{stack.url}/kv/pins", headers=headers, timeout=20).status_code == 200


def test_without_keys_only_this_machine_is_served() -> None:
    with Stack(host="0.0.0.0") as stack:
        for answer in (
            post(stack),
            httpx.get(f"{stack.url}/kv/pins", timeout=20),
            httpx.delete(f"{stack.url}/kv/pins", params={"name": "p"}, timeout=20),
        ):
            assert answer.status_code == 403
            assert "0.0.0.0: set admin_keys or api_keys, or host to 127.0.0.1" in answer.text
        assert stack.manager.pin_messages == []
