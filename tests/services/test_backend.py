"""The backend where real sockets do not lead: a manager that refuses, that takes nothing, and noise."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import zmq

from kvmanager.client import socket_endpoint
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    MAX_PART,
    Claimed,
    Evict,
    ExplainQuery,
    Pin,
    PlanQuery,
    SamplingParams,
    TextPart,
    TokenBatch,
    TokenEvent,
    decode_token_batch,
    encode,
)
from services import backend as module
from services.api.generation import Generation, Signal
from services.backend import Backend, in_parts
from services.metrics import Metrics
from services.tracker import Output, Request, Tracker
from services.unreadable import QUIET, Unreadable
from tests.noise import confused, deep
from tests.services.fake_stack import WAIT_SECONDS, Stack, says, wait_until


class StubClient:
    """A client whose every step is what `refusals` says: an error to raise, in order; then it works."""

    def __init__(self, **refusals: list[PagekeeperError]) -> None:
        self.refusals = refusals
        self.session: object = None
        self.sent: list[Any] = []

    def _step(self, name: str) -> None:
        if errors := self.refusals.get(name):
            raise errors.pop(0)

    async def connect(self, timeout: float) -> None:
        self._step("connect")
        self.session = object()

    async def receive(self) -> list[Any]:
        await asyncio.sleep(0.001)
        self._step("receive")
        return []

    async def send(self, message: Any) -> None:
        self._step("send")
        self.sent.append(message)

    def show_life(self) -> None:
        self._step("show_life")

    def close(self) -> None:
        self.session = None


def generation(name: str = "r") -> Generation:
    request = Request(name, (1,), SamplingParams(max_tokens=1, seed=0), [Output(0)], 0.0)
    return Generation(request, [], Signal())


def absent() -> PagekeeperError:
    return PagekeeperError("manager_absent", "not now")


def with_backend(
    folder: Path,
    client: StubClient,
    check: Callable[[Backend, list[PagekeeperError]], Coroutine[Any, Any, None]],
) -> None:
    async def run() -> None:
        (folder / "sockets").mkdir()
        fatal: list[PagekeeperError] = []
        metrics = Metrics(folder, "f", "model")
        endpoint = socket_endpoint(str(folder), "f")
        tracker = Tracker(10.0, 10)
        backend = Backend(client, endpoint, tracker, metrics, fatal.append)  # type: ignore[arg-type]
        backend.start()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await check(backend, fatal)
        finally:
            await backend.stop()
            metrics.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_what_could_not_be_sent_is_sent_later_in_order(tmp_path: Path) -> None:
    client = StubClient(connect=[absent()], send=[absent(), absent()], receive=[absent()])

    async def check(backend: Backend, fatal: list[PagekeeperError]) -> None:
        await until(lambda: backend.tracker.connected)
        first, second = generation("a"), generation("b")
        backend.submit(first)
        backend.submit(second)
        backend.cancel(first)
        await until(lambda: len(client.sent) >= 4)
        assert client.sent[0] == Claimed()
        assert [message.request_id for message in client.sent[1:4]] == ["a", "b", "a"]
        assert fatal == []

    with_backend(tmp_path, client, check)


def test_a_refused_hello_is_fatal(tmp_path: Path) -> None:
    client = StubClient(connect=[PagekeeperError("other_version", "this manager speaks version 2")])

    async def check(backend: Backend, fatal: list[PagekeeperError]) -> None:
        await until(lambda: bool(fatal))
        assert fatal[0].message == "this manager speaks version 2"

    with_backend(tmp_path, client, check)


def test_a_loop_that_fails_is_fatal(tmp_path: Path) -> None:
    client = StubClient(receive=[RuntimeError("a bug")])  # type: ignore[list-item]

    async def check(backend: Backend, fatal: list[PagekeeperError]) -> None:
        await until(lambda: bool(fatal))
        assert "a bug" in fatal[0].message

    with_backend(tmp_path, client, check)


def test_a_token_socket_that_was_removed_is_fatal(tmp_path: Path) -> None:
    async def check(backend: Backend, fatal: list[PagekeeperError]) -> None:
        waiting = generation()
        backend.submit(waiting)
        (tmp_path / "sockets" / "f.sock").unlink()
        await until(lambda: bool(fatal))
        assert "f.sock was removed" in fatal[0].message
        assert waiting.request.error is fatal[0]

    with_backend(tmp_path, StubClient(), check)


def test_the_outbox_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OUTBOX", 2)  # the session begins with one
    client = StubClient(send=[absent() for _ in range(1000)])

    async def check(backend: Backend, fatal: list[PagekeeperError]) -> None:
        await until(lambda: backend.tracker.connected)
        backend.submit(generation("a"))
        with pytest.raises(PagekeeperError, match="does not take messages"):
            backend.submit(generation("b"))

    with_backend(tmp_path, client, check)


def unreadable(stack: Stack) -> float:
    metrics = httpx.get(f"{stack.url}/metrics", timeout=20).text
    (line,) = (x for x in metrics.splitlines() if x.startswith("pagekeeper_unreadable_token_batches_total"))
    return float(line.rsplit(" ", 1)[1])


def test_unreadable_messages_are_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    unreadable = Unreadable("letters")
    for now in (0.0, 1.0, 2.0, QUIET):
        unreadable.add(now, f"torn at {now:g}")
    assert unreadable.count == 4
    assert [record.getMessage() for record in caplog.records] == [
        "dropped 1 letters that cannot be read, last: torn at 0",
        "dropped 3 letters that cannot be read, last: torn at 10",
    ]


def test_noise_on_the_token_socket_is_dropped() -> None:
    with Stack() as stack:
        stack.manager.script = says("fine")
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(socket_endpoint(stack.pool_directory, "frontend-0"))
            batch = encode(TokenBatch((TokenEvent("r", 0, -1, -1, (1 << 40, -5), 0),)))
            noises = [b"", b"noise", b"\x93\x01\x02\x03", bytes(1000), deep(100_000)]
            noises += [*confused([decode_token_batch(batch)], Random(3), 300), batch]
            for noise in noises:
                push.send(noise)
            push.send_multipart([batch, batch])
            answer = httpx.post(f"{stack.url}/v1/completions", json={"prompt": "x"}, timeout=20)
        assert answer.json()["choices"][0]["text"] == "fine"
        assert stack.fatal == []
        wait_until(lambda: unreadable(stack) >= 6, "the count of what cannot be read")


@pytest.mark.parametrize("length", [1, MAX_PART, MAX_PART + 1, 2 * MAX_PART, 2 * MAX_PART + 1])
@pytest.mark.parametrize("kind", [ExplainQuery, PlanQuery, Pin, Evict])
def test_a_long_text_is_asked_about_in_parts(length: int, kind: Any) -> None:
    tokens = list(range(length))
    more = {PlanQuery: {"max_tokens": 1}, Pin: {"name": "p", "ttl": 1.0}}.get(kind, {})
    query = kind(query_id=7, token_ids=tuple(tokens), cache_salt="salt", tenant="aa" * 16, **more)
    sent: list[Any] = [*in_parts(query)]
    assert [type(each) for each in sent] == [*[TextPart] * (len(sent) - 1), kind]
    assert [token for each in sent for token in each.token_ids] == tokens
    assert (len(sent) > 1) == (length > MAX_PART)
    lengths = [len(each.token_ids) for each in sent]
    assert [each.start for each in sent] == [sum(lengths[:place]) for place in range(len(sent))]
    for each in sent:
        assert (each.query_id, each.cache_salt, each.tenant) == (7, "salt", "aa" * 16)
        assert 1 <= len(each.token_ids) <= MAX_PART
