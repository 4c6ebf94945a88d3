"""A stream that cannot go on gets exactly one error event, then [DONE]; what has not begun gets a status."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.types import Message

import services.backend
from services.config import FrontendConfig
from services.streams.journal import EVENT_OVERHEAD, Batch, StreamState
from services.streams.tail import Source, Tail
from tests.services.fake_stack import Stack, says, wait_until
from tests.services.test_journal import SPEC

PLAIN: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100, "stream": True}
RESUMABLE: dict[str, Any] = {**PLAIN, "stream_options": {"resumable": True}}
WHOLE: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100}


class Reader:
    """One request, read to its end in a thread of its own."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        self.status = 0
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(f"{stack.url}/v1/completions", body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines.append(line)

    @property
    def begun(self) -> bool:
        return any(line.startswith("data: ") for line in self.lines)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def check_end(self, code: str) -> None:
        """The last two events are the error and [DONE], and no other is one of them."""
        data = [line[6:] for line in self.lines if line.startswith("data: ")]
        errors = [json.loads(item)["error"] for item in data[:-1] if '"error"' in item]
        assert data[-1] == "[DONE]"
        assert data.count("[DONE]") == 1
        assert [error["code"] for error in errors] == [code]
        assert '"error"' in data[-2]


def run(ending: Callable[[Stack, list[Reader]], None], code: str, **settings: Any) -> list[Reader]:
    """A stream, a resumable one and a whole answer; the streams have begun, and none gets on, when `ending`
    happens.
    """
    with Stack(**settings) as stack:
        stack.manager.script = says("One two three four five six seven")
        stack.manager.hold_at = 2
        stack.hold()
        readers = [Reader(stack, PLAIN), Reader(stack, RESUMABLE)]
        wait_until(lambda: len(stack.manager.submits) == 2, "the streams")
        stack.go_on()
        wait_until(lambda: all(reader.begun for reader in readers), "their texts")
        wait_until(lambda: not stack.manager.flow.is_set(), "the hold")
        readers.append(Reader(stack, WHOLE))
        wait_until(lambda: len(stack.manager.submits) == 3, "the third request")
        ending(stack, readers)
    for reader in readers:
        reader.join()
    for reader in readers[:2]:
        reader.check_end(code)
    assert json.loads("".join(readers[2].lines))["error"]["code"] == code
    return readers


def test_the_drain_time_is_over() -> None:
    """The end of the stack stops its frontends, which wait a second."""
    readers = run(lambda stack, readers: None, "stopping")
    assert [reader.status for reader in readers] == [200, 200, 503]
    numbered = [line for line in readers[1].lines if line.startswith("id: ")]
    events = [line for line in readers[1].lines if line.startswith("data: ")]
    assert len(numbered) == len(events) - 2, "the stream has not ended, so these two have no number"


def test_the_frontend_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: bytes) -> None:
        raise MemoryError("broken")

    def fail(stack: Stack, readers: list[Reader]) -> None:
        monkeypatch.setattr(services.backend, "decode_token_batch", broken)
        stack.go_on()
        wait_until(lambda: len(stack.fatal) == 1, "the end of the token loop")

    readers = run(fail, "internal")
    assert [reader.status for reader in readers] == [200, 200, 500]


def test_the_manager_stays_away() -> None:
    def fail(stack: Stack, readers: list[Reader]) -> None:
        stack.manager.deaf = True
        for reader in readers:
            reader.join()

    readers = run(fail, "manager_absent", manager_timeout_seconds=0.5)
    assert [reader.status for reader in readers] == [200, 200, 503]


def test_a_reader_that_is_too_slow_is_told_what_it_missed() -> None:
    state = StreamState(SPEC, 4 * (1 + EVENT_OVERHEAD))
    for number in range(1, 9):
        state.apply(Batch(number, (b"%d" % number,)))

    async def test() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.sleep(3600)
            raise AssertionError

        source = Mock(spec=Source, state=state, begun=True, numbered_to=None)
        await Tail(FrontendConfig(), source, 2)({"type": "http"}, receive, send)
        return sent

    start, end = asyncio.run(test())
    assert (b"x-stream-id", b"cmpl-0") in start["headers"]
    error, done, _ = end["body"].split(b"\n\n")
    assert json.loads(error[6:])["error"]["code"] == "events_dropped"
    assert done == b"data: [DONE]"
    assert not end["more_body"]
