"""The terminal chat against small servers: what is sent, what is shown, and what is remembered."""

import asyncio
import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from services.terminal import chat_client
from services.terminal.chat_client import Chat, ChatApi, ChatConfig, Reply, events
from services.terminal.server_errors import ServerError

USAGE = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def chunk(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


def stream_of(*texts: str) -> list[dict[str, Any]]:
    said = [chunk(text) for text in texts]
    return [chunk(""), *said, chunk(finish="stop"), {"choices": [], "usage": USAGE}]


def encoded(chunks: list[dict[str, Any]]) -> bytes:
    lines = [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks]
    return b": keep-alive\n\n" + b"".join(lines) + b"data: [DONE]\n\n"


def broken_off(text: str) -> bytes:
    """A reply up to the end of `text`."""
    whole = encoded([chunk(text)])
    return whole.removesuffix(b"data: [DONE]\n\n")


class Body(httpx.SyncByteStream):
    """A body that runs `between` after its first piece, and remembers that it was closed."""

    def __init__(self, pieces: list[bytes], between: Callable[[], None]) -> None:
        self.pieces = pieces
        self.between = between
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            yield piece
            self.between()

    def close(self) -> None:
        self.closed = True


class Server:
    """A server whose replies are given beforehand; it remembers what it was asked."""

    def __init__(self, *replies: httpx.Response | bytes) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.models = ["tiny", "other"]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        self.asked.append(json.loads(request.content))
        reply = self.replies.pop(0)
        return httpx.Response(200, content=reply) if isinstance(reply, bytes) else reply


def talk(server: Callable[[httpx.Request], httpx.Response], *lines: Any, **settings: Any) -> tuple[Chat, str]:
    """A chat in which the user types `lines` (exceptions are raised); returns it and what was shown."""
    typed, output, config = iter(lines), io.StringIO(), ChatConfig(**settings)

    def read(_: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    with httpx.Client(base_url=config.url, transport=httpx.MockTransport(server)) as client:
        chat = Chat(ChatApi(client, config), config, Console(file=output, width=200), read)
        chat.run()
    return chat, output.getvalue()


def test_a_reply_is_shown_and_remembered() -> None:
    server = Server(encoded(stream_of("Hel", "lo ", "🎉\u2028!")), encoded(stream_of("Bye")))
    chat, shown = talk(server, "Hi", "", "Again", system="Be brief.")
    assert "Hello 🎉\u2028!\n" in shown
    assert "16 of 20 prompt tokens cached · 3 tokens" in shown
    assert "tokens/s" in shown
    assert [message["content"] for message in server.asked[1]["messages"]] == [
        *("Be brief.", "Hi", "Hello 🎉\u2028!", "Again")
    ]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]


def test_settings_reach_the_server() -> None:
    server = Server(encoded(stream_of("a")), encoded(stream_of("a")))
    talk(server, "Hi", model="other", max_tokens=7, temperature=0.0)
    assert (server.asked[0]["model"], server.asked[0]["max_tokens"], server.asked[0]["temperature"]) == (
        "other",
        7,
        0.0,
    )
    assert server.asked[0]["stream_options"] == {"include_usage": True}
    talk(server, "Hi")
    assert server.asked[1]["model"] == "tiny"
    assert "max_tokens" not in server.asked[1]


def test_a_new_conversation_keeps_the_system_prompt_only() -> None:
    server = Server(encoded(stream_of("a")), encoded(stream_of("b")))
    talk(server, "Hi", "/new", "Ho", system="S")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["S", "Ho"]


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    body = Body([broken_off("so far"), b"never read"], interrupt)
    server = Server(httpx.Response(200, stream=body), encoded(stream_of("b")))
    _, shown = talk(server, "Hi", KeyboardInterrupt(), "Go on")
    assert body.closed
    assert "stopped · 6 characters" in shown
    assert [message["content"] for message in server.asked[1]["messages"]] == ["Hi", "so far", "Go on"]


def test_text_reaches_the_terminal_as_it_is_without_control_characters() -> None:
    chat, shown = talk(Server(encoded(stream_of("a\x1b[2Jb\x07\u009b\tc :smile: [bold]"))), "Hi")
    assert "a[2Jb\tc :smile: [bold]\n" in shown
    assert "\x1b" not in shown
    assert chat.messages[-1]["content"] == "a\x1b[2Jb\x07\u009b\tc :smile: [bold]"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(503, json={"error": {"message": "no runner yet"}}), "answered 503: no runner yet"),
        (httpx.Response(401, json={"error": {"message": "bad key"}}), "bad key; give --api-key"),
        (httpx.Response(502, text="gateway"), "answered 502: gateway"),
        (b'data: {"error": {"message": "lost it"}}\n\n', "lost it"),
        (b"data: {broken\n\n", "no JSON object"),
        (b'data: {"choices": []}\n\n', "broke off"),
    ],
)
def test_a_failed_turn_is_told_and_forgotten(reply: httpx.Response | bytes, message: str) -> None:
    chat, shown = talk(Server(reply), "Hi")
    assert message in shown
    assert chat.messages == []


def test_a_reply_that_breaks_off_keeps_what_was_said() -> None:
    chat, shown = talk(Server(broken_off("so far")), "Hi")
    assert "broke off" in shown
    assert chat.messages[-1] == {"role": "assistant", "content": "so far"}


def test_an_unknown_model_is_refused_with_what_there_is() -> None:
    with pytest.raises(ServerError, match="no model 'big'; it has tiny, other"):
        talk(Server(), model="big")


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ServerError, match="more than 100 bytes"):
        list(events([b"data: ", b"x" * 100]))


def test_a_summary_says_why_a_reply_ended() -> None:
    reply = Reply("ab", {**USAGE, "completion_tokens": 1}, "length", 0.5, 0.5)
    assert (
        reply.summary() == "16 of 20 prompt tokens cached · 1 tokens · first after 0.50 s · ended by length"
    )
    assert "0 of 20" in Reply("ab", {"prompt_tokens": 20, "completion_tokens": 1}).summary()


@given(st.lists(st.text(max_size=9), max_size=5), st.lists(st.integers(0, 2000), max_size=9))
def test_events_come_whole_however_the_bytes_are_cut(texts: list[str], places: list[int]) -> None:
    data = encoded(stream_of(*texts))
    ends = sorted({place % len(data) for place in places})
    pieces = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    assert list(events(pieces)) == stream_of(*texts)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "nothing"])
def test_a_wrong_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat_client.main([f"--url={url}"])
    assert f"--url={url!r} is not allowed" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert chat_client.main([f"--url=http://127.0.0.1:{free.getsockname()[1]}"]) == 1
    assert "is `pagekeeper serve` running there?" in " ".join(capsys.readouterr().out.split())


class RealServer:
    """What a real HTTP server was shown; it answers "endless" with a reply that never ends."""

    def __init__(self) -> None:
        self.url = ""
        self.keys: list[str | None] = []
        self.disconnected = threading.Event()

    async def models(self, request: Request) -> JSONResponse:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def chat(self, request: Request) -> StreamingResponse:
        question = (await request.json())["messages"][-1]["content"]
        replies = self.endless() if question == "endless" else one_piece(encoded(stream_of("Hel", "lo")))
        return StreamingResponse(replies, media_type="text/event-stream")

    async def endless(self) -> AsyncIterator[bytes]:
        yield broken_off("so far")
        try:
            await asyncio.Event().wait()
        finally:
            self.disconnected.set()


async def one_piece(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.fixture
def real_server() -> Iterator[RealServer]:
    real = RealServer()
    routes = [Route("/v1/models", real.models), Route("/v1/chat/completions", real.chat, methods=["POST"])]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            real.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield real
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()


def test_the_command_talks_with_a_real_server(
    real_server: RealServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = iter(["Hi"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setenv("PAGEKEEPER_MODEL", "/a/path/that/is/not/a/name")
    monkeypatch.setattr("builtins.input", read)
    assert chat_client.main([f"--url={real_server.url}", "--api-key=k"]) == 0
    assert "Hello" in capsys.readouterr().out
    assert real_server.keys == ["Bearer k"]


class Terminal:
    """A program in a terminal of its own; every wait is bounded by a minute of silence."""

    def __init__(self, *command: str) -> None:
        self.shown = b""
        self.ended = False
        self.process, self.master = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background are started without it
            os.execv(command[0], command)

    def read_until(self, text: str) -> None:
        """Fails if the program ends before `text` is shown. What comes after it is for the next call."""
        while text.encode() not in self.shown:
            self.shown += self.read()
        self.shown = self.shown.partition(text.encode())[2]

    def read(self) -> bytes:
        readable, _, _ = select.select([self.master], [], [], 60)
        assert readable, f"nothing more after {self.shown!r}"
        return os.read(self.master, 4096)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def exit_status(self) -> int:
        """Reads on until the program has closed the terminal."""
        with contextlib.suppress(OSError):  # Linux answers EIO then
            while self.read():
                continue
        self.ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@pytest.fixture
def terminal(real_server: RealServer) -> Iterator[Terminal]:
    """A chat with the real server."""
    program = (
        f"from services.terminal.chat_client import main; raise SystemExit(main(['--url={real_server.url}']))"
    )
    terminal = Terminal(sys.executable, "-c", program)
    yield terminal
    os.close(terminal.master)
    if not terminal.ended:
        os.kill(terminal.process, signal.SIGKILL)
        os.waitpid(terminal.process, 0)


def test_ctrl_c_and_ctrl_d_in_a_real_terminal(real_server: RealServer, terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type(b"endless\n")
    terminal.read_until("so far")
    terminal.type(b"\x03")
    terminal.read_until("stopped · 6 characters")
    assert real_server.disconnected.wait(30)
    terminal.read_until("> ")
    terminal.type(b"Hi\n")
    terminal.read_until("16 of 20 prompt tokens cached")
    terminal.read_until("> ")
    terminal.type(b"\x04")
    assert terminal.exit_status() == 0
