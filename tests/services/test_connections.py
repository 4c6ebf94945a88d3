"""Clients that go away, that are slow, and silences; runners and managers that die behind a stream."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmanager.protocol import Rejected
from tests.services.fake_stack import Stack, events, says, wait_until

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(keep_alive_seconds=0.05) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    shared.manager.script = says(TEXT)
    shared.manager.submits.clear()
    shared.manager.cancels.clear()
    yield shared
    shared.manager.reject = lambda submit: None
    shared.manager.hold_at = None
    shared.go_on()
    wait_until(lambda: shared.manager.running == 0, "nothing running")


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hello", "max_tokens": 100, **fields}


def raw_request(stack: Stack, *, close: bool = False, declared: int = 0, **fields: Any) -> socket.socket:
    """A connection (with a small receive buffer) on which the request was sent, and nothing read."""
    host, port = stack.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    data = json.dumps(body(**fields)).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {declared or len(data)}"]
    head += ["Connection: close"] if close else []
    connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled(stack: Stack, stream: bool) -> None:
    stack.hold()
    connection = raw_request(stack, stream=stream)
    wait_until(lambda: stack.manager.running == 1, "the request")
    connection.close()
    wait_until(lambda: len(stack.manager.cancels) == 1, "the cancel")
    assert stack.manager.cancels[0].request_id == stack.manager.submits[0].request_id


def test_a_client_that_goes_away_in_the_middle_is_cancelled(stack: Stack) -> None:
    stack.manager.script = lambda submit, choice: [300] * 1_000_000
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json=body(stream=True, max_tokens=8000)
    ) as answer:
        lines = answer.iter_lines()  # held: httpx closes the connection with its iterator
        next(lines)
    wait_until(lambda: len(stack.manager.cancels) == 1, "the cancel")


def test_all_prompts_of_a_call_are_cancelled(stack: Stack) -> None:
    stack.hold()
    connection = raw_request(stack, prompt=["a", "b", "c"], n=2)
    wait_until(lambda: stack.manager.running == 3, "three requests")
    connection.close()
    wait_until(lambda: len(stack.manager.cancels) == 3, "three cancels")


def test_silence_gets_comments(stack: Stack) -> None:
    stack.hold()
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body(stream=True), timeout=20) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(4)]
        assert seen == [": keep-alive", ""] * 2
        stack.go_on()
        rest = list(lines)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(rest)) == TEXT


def test_a_slow_client_holds_up_nobody_and_gets_all() -> None:
    """The slow one's socket takes little; its text waits, merged, while others are served."""
    tokens = 4000
    with Stack(send_buffer=4096) as stack:
        stack.manager.script = says("word " * (tokens - 1))
        slow = raw_request(stack, stream=True, max_tokens=tokens, close=True)
        wait_until(lambda: stack.manager.finished == 1, "all its tokens sent, though nothing was read")
        stack.manager.script = says(TEXT)
        answer = httpx.post(f"{stack.url}/v1/completions", json=body(), timeout=20)
        assert answer.json()["choices"][0]["text"] == TEXT
        received = b"".join(iter(lambda: slow.recv(65536), b""))
        slow.close()
    payload = unchunked(received.partition(b"\r\n\r\n")[2]).decode()
    chunks = events(payload.splitlines())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "word " * (tokens - 1)
    assert len(chunks) < tokens, "what waited was merged"


def unchunked(data: bytes) -> bytes:
    """Undo HTTP's chunked transfer coding."""
    result = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        result += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return result


class Streaming:
    """A stream read in a thread; `chunks` grows."""

    def __init__(self, stack: Stack, **fields: Any) -> None:
        self.lines: list[str] = []
        self._stack, self._fields = stack, fields
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        url = f"{self._stack.url}/v1/completions"
        with httpx.stream("POST", url, json=body(**self._fields, stream=True), timeout=20) as answer:
            for line in answer.iter_lines():
                self.lines.append(line)

    def chunks(self) -> list[Any]:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return events(self.lines)


@pytest.mark.parametrize("what", ["lose_runner", "restart"])
def test_a_death_behind_the_stream_costs_no_token(stack: Stack, what: str) -> None:
    stack.manager.hold_at = 4
    streaming = Streaming(stack, seed=5)
    wait_until(lambda: any("four" in line for line in streaming.lines), "four tokens")
    stack.do(getattr(stack.manager, what))
    wait_until(lambda: len(stack.manager.submits) == 2, "the resubmission")
    first, second = stack.manager.submits
    assert (second.request_id, second.attempt, second.arrival) == (first.request_id, 1, first.arrival)
    assert second.sampling == first.sampling
    assert list(second.choices[0].output_token_ids) == stack.model.tokenizer.encode("one two three four")
    stack.go_on()
    chunks = streaming.chunks()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_error_in_the_middle_is_one_event(stack: Stack) -> None:
    stack.manager.hold_at = 4
    streaming = Streaming(stack)
    wait_until(lambda: any("four" in line for line in streaming.lines), "four tokens")
    stack.manager.reject = lambda s: Rejected(s.request_id, s.attempt, "can_never_fit", "too large")
    stack.do(stack.manager.lose_runner)
    *chunks, last = streaming.chunks()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three four"
    assert last["error"]["message"] == "too large"


def test_an_absent_manager_is_503_in_time() -> None:
    with Stack(manager=False, manager_timeout_seconds=0.3) as stack:
        answer = httpx.post(f"{stack.url}/v1/completions", json=body(), timeout=20)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "did not accept" in answer.json()["error"]["message"]
        assert httpx.get(f"{stack.url}/health", timeout=20).status_code == 200
        ready = httpx.get(f"{stack.url}/ready", timeout=20)
        assert ready.status_code == 503
        assert "KV manager" in ready.json()["error"]["message"]


def test_a_request_waits_for_a_manager_that_comes_late() -> None:
    with Stack(manager=False) as stack:
        connection = raw_request(stack)
        stack.start_manager()
        stack.manager.script = says(TEXT)
        wait_until(lambda: b"nine ten" in connection.recv(65536, socket.MSG_PEEK), "the answer")
        connection.close()


def test_a_body_that_does_not_come_is_408() -> None:
    with Stack(client_timeout_seconds=0.2) as stack:
        connection = raw_request(stack, prompt="Hello", declared=10**6)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        connection.close()


def test_a_client_that_goes_away_while_it_sends_harms_nobody() -> None:
    with Stack() as stack:
        raw_request(stack, declared=10**6).close()
        stack.manager.script = says(TEXT)
        answer = httpx.post(f"{stack.url}/v1/completions", json=body(), timeout=20)
        assert answer.json()["choices"][0]["text"] == TEXT
        assert len(stack.manager.submits) == 1


def test_a_client_that_never_reads_is_given_up() -> None:
    with Stack(send_buffer=4096, client_timeout_seconds=0.2) as stack:
        stack.manager.script = lambda submit, choice: [300] * 1_000_000
        connection = raw_request(stack, stream=True, max_tokens=8000)
        wait_until(lambda: stack.manager.running == 1, "the request")
        wait_until(lambda: stack.manager.running == 0, "its end")
        connection.close()


def test_a_full_frontend_is_503() -> None:
    with Stack(max_requests=1) as stack:
        stack.hold()
        connection = raw_request(stack)
        wait_until(lambda: stack.manager.running == 1, "the first request")
        answer = httpx.post(f"{stack.url}/v1/completions", json=body(), timeout=20)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        connection.close()
