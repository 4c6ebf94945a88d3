"""The head of a request: too long, too slow, or all right."""

import socket

import httpx
import pytest

from services.http_protocol import MAX_HEAD_BYTES
from tests.services.fake_stack import Stack, says, wait_until


def connect(stack: Stack) -> socket.socket:
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("line", [b"A: x\r\n", b"x"])
def test_a_head_that_is_too_long_is_431(line: bytes) -> None:
    head = (b"GET /health HTTP/1.1\r\nHost: x\r\nA: x" + line * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1]
    with Stack() as stack, connect(stack) as connection:
        connection.sendall(head)  # no byte more, so that the server has read all of it when it closes
        found = answer(connection)
        assert found.startswith(b"HTTP/1.1 431 ")
        assert f"more than {MAX_HEAD_BYTES} bytes".encode() in found


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nA"])
def test_a_head_that_does_not_come_is_408(sent: bytes) -> None:
    with Stack(client_timeout_seconds=0.2) as stack, connect(stack) as connection:
        connection.sendall(sent)
        assert answer(connection).startswith(b"HTTP/1.1 408 ")


def test_a_second_head_on_a_connection_is_bounded_too() -> None:
    with Stack(client_timeout_seconds=0.2) as stack, connect(stack) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        first = connection.recv(65536)
        while not first.endswith(b"{}"):
            first += connection.recv(65536)
        connection.sendall(b"GET /hea")
        assert answer(connection).startswith(b"HTTP/1.1 408 ")


def test_a_half_head_behind_a_stream_does_not_mix_with_it() -> None:
    with Stack(client_timeout_seconds=0.2) as stack, connect(stack) as connection:
        stack.hold()
        data = b'{"prompt":"Hello"}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        connection.sendall(data)
        wait_until(lambda: stack.manager.running == 1, "the request")
        connection.sendall(b"GET /hea")
        assert answer(connection) == b""
        wait_until(lambda: stack.manager.running == 0, "its cancel")


def test_an_answer_may_take_longer_than_a_head() -> None:
    with Stack(client_timeout_seconds=0.2) as stack, connect(stack) as connection:
        stack.manager.script = says("yes")
        stack.hold()
        data = b'{"prompt":"Hello"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(data) + data)
        connection.settimeout(1.0)  # five times as long as a head may take
        with pytest.raises(TimeoutError):
            connection.recv(1)
        stack.go_on()
        connection.settimeout(20)
        found = answer(connection)
        assert found.startswith(b"HTTP/1.1 200 ")
        assert b"yes" in found


def test_a_long_body_and_a_long_answer_are_no_head() -> None:
    with Stack() as stack, httpx.Client(base_url=stack.url, timeout=20) as client:
        stack.manager.script = says("yes")
        for _ in range(3):
            found = client.post("/tokenize", json={"prompt": "word " * 100_000})
            assert found.json()["count"] == 100_001
        assert client.get("/health", headers={"A": "x" * 60_000}).status_code == 200
