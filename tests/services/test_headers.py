"""API keys, CORS, request ids, and the line that is logged for each request."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from kvmanager.settings import SettingError
from services.config import FrontendConfig, read_keys
from tests.services.fake_stack import Stack, says, wait_until

ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("from-file\n\n")
    with Stack(api_keys="first, second", api_keys_file=str(keys), cors_origins=ORIGIN) as stack:
        stack.manager.script = says("fine")
        yield stack


def get(stack: Stack, path: str = "/v1/models", **headers: str) -> httpx.Response:
    return httpx.get(f"{stack.url}{path}", headers=headers, timeout=20)


@pytest.mark.parametrize("key", ["first", "second", "from-file"])
def test_keys_are_accepted(stack: Stack, key: str) -> None:
    assert get(stack, authorization=f"Bearer {key}").status_code == 200


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic first", "Bearer firs", "Bearer f\xfcrst", "first"]
)
def test_without_a_key_is_401(stack: Stack, header: str) -> None:
    headers = {b"authorization": header.encode("latin-1")} if header else {}
    answer = httpx.get(f"{stack.url}/v1/models", headers=headers, timeout=20)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"


def test_the_openai_client_understands(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert client.with_options(api_key="second").models.list().data


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_need_no_key(stack: Stack, path: str) -> None:
    assert get(stack, path).status_code == 200


def test_no_keys_lets_all_in_and_a_bad_file_is_named(tmp_path: Path) -> None:
    assert not read_keys(FrontendConfig())
    with pytest.raises(SettingError, match="cannot be read"):
        read_keys(FrontendConfig(api_keys_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SettingError, match="holds no key"):
        read_keys(FrontendConfig(api_keys_file=str(tmp_path / "empty")))


def test_cors(stack: Stack) -> None:
    preflight = httpx.options(
        f"{stack.url}/v1/chat/completions",
        headers={"origin": ORIGIN, "access-control-request-method": "POST"},
        timeout=20,
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert get(stack, origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in get(stack, origin="https://evil.example").headers


def test_request_ids_are_echoed_or_made(stack: Stack) -> None:
    assert get(stack, **{"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = get(stack).headers["x-request-id"]
    assert len(made) == 32
    for odd in ("x" * 129, "a b", 'quote"', "<script>"):
        assert get(stack, **{"x-request-id": odd}).headers["x-request-id"] not in (odd, made)


def test_a_refusal_is_logged_once(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"x-request-id": "bad", "authorization": "Bearer first"}
    with caplog.at_level(logging.INFO, "pagekeeper.requests"):
        httpx.post(f"{stack.url}/v1/completions", json={}, headers=headers, timeout=20)
    (line,) = map(json.loads, caplog.messages)
    assert (line["request_id"], line["status"]) == ("bad", 400)
    assert "`prompt` is missing" in line["error"]


def test_two_requests_with_one_id_do_not_meet(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"x-request-id": "same", "authorization": "Bearer first"}
    with caplog.at_level(logging.INFO, "pagekeeper.requests"):
        answers = [
            httpx.post(f"{stack.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=20)
            for _ in range(2)
        ]
        wait_until(lambda: len(caplog.messages) == 2, "two lines")
    assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 2
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert len({submit.request_id for submit in stack.manager.submits[-2:]}) == 2
    for line, answer in zip(map(json.loads, caplog.messages), answers, strict=True):
        assert (line["request_id"], line["id"], line["status"]) == ("same", answer.json()["id"], 200)
        assert (line["finish_reason"], line["prompt_tokens"], line["cached_tokens"]) == ("stop", 1, 0)
        assert line["output_tokens"] == answer.json()["usage"]["completion_tokens"]
        assert line["ttft_ms"] <= line["e2e_ms"]
        assert set(line) >= {"route", "stream", "itl_ms"}
