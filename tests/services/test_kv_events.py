"""GET /kv/events: a follower ends equal to the cache, whatever is lost on the way."""

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.auth import tenant_of
from services.kv import events
from services.kv.collect import FRESH, Collector
from services.kv.events import KEPT_PLACES, MAX_FOLLOWERS, Follower, own_places
from tests.services.fake_cache import FakeCache
from tests.services.fake_stack import Stack, wait_until
from tests.services.test_frontend_process import alive, free_port, start

ACME = tenant_of(b"acme")


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(admin_keys="root", tenant_keys="acme") as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    boot = shared.manager.cache.boot_id
    shared.manager.cache = FakeCache()
    shared.manager.cache.boot_id = boot + "x"
    return shared


class Client:
    """Reads a stream of events, in the stack's loop, and keeps what they say is cached."""

    def __init__(self) -> None:
        self.status = 0
        self.events: list[tuple[str, str, Any]] = []  # name, id, data
        self.comments = 0
        self.held: dict[str, int] = {}  # hash → tokens
        self.last_id = ""
        self._snapshot: dict[str, int] = {}

    async def read(self, url: str, headers: dict[str, str], params: dict[str, str]) -> None:
        name, place = "", ""
        async with (
            httpx.AsyncClient(timeout=20) as http,
            http.stream("GET", url, headers=headers, params=params) as answer,
        ):
            self.status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name, place = line[7:], ""
                elif line.startswith("id: "):
                    place = line[4:]
                elif line.startswith("data: "):
                    self._take(name, place, json.loads(line[6:]))
                elif line.startswith(":"):
                    self.comments += 1

    def _take(self, name: str, place: str, data: Any) -> None:
        if name == "snapshot":
            self._snapshot |= {block["hash"]: block["num_tokens"] for block in data["blocks"]}
            if data["last"]:
                self.held, self._snapshot = self._snapshot, {}
        elif name == "stored":
            self.held[data["hash"]] = len(data["token_ids"])
        elif name == "removed":
            self.held.pop(data["hash"], None)
        elif name == "cleared":
            self.held.clear()
        self.last_id = place or self.last_id
        self.events.append((name, place, data))

    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


@contextmanager
def following(
    stack: Stack, key: str = "root", since: Client | None = None, **params: str
) -> Iterator[Client]:
    """A client that goes away at the end; it may go on where another one was."""
    headers, client = {"authorization": f"Bearer {key}"}, Client()
    if since is not None:
        headers["last-event-id"], client.held = since.last_id, since.held
    reading = client.read(f"{stack.url}/kv/events", headers, params)
    task = asyncio.run_coroutine_threadsafe(reading, stack.loop)
    try:
        wait_until(lambda: client.status == 200, "the stream")
        yield client
    finally:
        task.cancel()


def held(cache: FakeCache, tenant: str = "") -> dict[str, int]:
    salt = bytes.fromhex(tenant)
    return {b.hash.hex(): len(b.tokens) for b in cache.blocks if b is not None and b.salt.startswith(salt)}


def in_step(client: Client, cache: FakeCache, tenant: str = "") -> Callable[[], bool]:
    return lambda: (
        client.held == held(cache, tenant)
        and any(data["sequence"] == cache.at.sequence for _, _, data in client.events)
    )


def test_a_snapshot_then_what_changes(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHUNK", 4)
    cache = stack.manager.cache
    cache.store([1] * 16 * 9 + [2])
    with following(stack) as client:
        wait_until(in_step(client, cache), "the snapshot")
        assert client.names() == ["snapshot"] * 3
        assert [data["last"] for _, _, data in client.events] == [False, False, True]
        assert [place for _, place, _ in client.events] == ["", "", f"{cache.boot_id}:10"]
        (number,) = stack.do(lambda: cache.store([3] * 5))
        stack.do(lambda: cache.remove(9, "capacity", "cmpl-1-0"))
        wait_until(in_step(client, cache), "the tail")
        (_, first, stored), (_, second, removed) = client.events[-2:]
        assert (stored["kind"], stored["block"], stored["token_ids"]) == ("stored", number, [3] * 5)
        assert (removed["cause"], removed["request_id"], "text" in removed) == ("capacity", "cmpl-1-0", False)
        assert (first, second) == (f"{cache.boot_id}:11", f"{cache.boot_id}:12")


def test_a_client_goes_on_where_it_was(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    with following(stack) as client:
        wait_until(in_step(client, cache), "the snapshot")
    cache.store([2] * 40)
    cache.remove(0)
    with following(stack, since=client) as again:
        wait_until(in_step(again, cache), "what it missed")
        assert again.names() == ["stored"] * 3 + ["removed"]


@pytest.mark.parametrize("how", ["forgotten", "restarted", "of the future"])
def test_a_gap_is_said_and_followed_by_a_snapshot(stack: Stack, how: str) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    with following(stack) as client:
        wait_until(in_step(client, cache), "the snapshot")
    cache.store([2] * 40)
    if how == "forgotten":
        cache.forget = 5
    elif how == "restarted":
        cache.boot_id += "y"
    else:
        client.last_id = f"{cache.boot_id}:99"
    with following(stack, since=client) as again:
        wait_until(in_step(again, cache), "another snapshot")
        assert again.names() == ["gap", "snapshot"]
        assert again.events[0][1] == ""
        assert again.events[0][2]["after"] == {"forgotten": 3, "restarted": 0, "of the future": 99}[how]


def test_a_manager_that_starts_again_under_a_follower(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    with following(stack) as client:
        wait_until(in_step(client, cache), "the snapshot")
        fresh = FakeCache()
        fresh.boot_id = cache.boot_id + "y"
        fresh.store([5] * 16)
        stack.do(lambda: setattr(stack.manager, "cache", fresh))
        wait_until(in_step(client, fresh), "the other snapshot")
        assert client.names() == ["snapshot", "gap", "snapshot"]


def test_without_a_snapshot_and_a_tenants_own(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    with following(stack, snapshot="0") as client, following(stack, "acme") as tenant:
        wait_until(lambda: tenant.names() == ["snapshot"], "its empty snapshot")
        stack.do(lambda: cache.store([2] * 16))
        stack.do(lambda: cache.store([3] * 16, tenant=ACME))
        wait_until(lambda: len(client.events) == 2, "both events")
        wait_until(lambda: tenant.held == held(cache, ACME), "its own event")
        assert client.names() == ["stored", "stored"]
        assert tenant.names() == ["snapshot", "stored"]
        assert tenant.events[1][2]["token_ids"] == [3] * 16


def test_silence_is_broken_and_a_stopping_frontend_says_so() -> None:
    with Stack(keep_alive_seconds=0.05) as stack, following(stack) as client:
        wait_until(lambda: client.comments >= 2, "comments")
        stack.app.state.stopping = lambda: True
        wait_until(lambda: client.names()[-1:] == ["error"], "the last words")
        assert client.events[-1][2]["error"]["code"] == "stopping"


def test_followers_are_limited_and_a_head_is_no_stream(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    url, headers = f"{stack.url}/kv/events", {"authorization": "Bearer root"}
    monkeypatch.setattr(events, "MAX_FOLLOWERS", 1)
    wait_until(
        lambda: httpx.head(url, headers=headers, timeout=20).status_code == 200, "the end of earlier ones"
    )
    with following(stack):
        refused = httpx.get(url, headers=headers, timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_followers")
    wait_until(lambda: httpx.head(url, headers=headers, timeout=20).status_code == 200, "its place")
    assert MAX_FOLLOWERS > 1


def test_followers_that_come_all_at_once_are_limited_too(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is room is decided when they are counted, not before the manager is asked."""
    url, headers = f"{stack.url}/kv/events", {"authorization": "Bearer root"}
    monkeypatch.setattr(events, "MAX_FOLLOWERS", 2)
    wait_until(
        lambda: httpx.head(url, headers=headers, timeout=20).status_code == 200, "the end of earlier ones"
    )

    async def follow_all() -> list[int]:
        async with httpx.AsyncClient(timeout=20, headers=headers) as http, AsyncExitStack() as open_streams:
            streams = [open_streams.enter_async_context(http.stream("GET", url)) for _ in range(12)]
            return sorted(answer.status_code for answer in await asyncio.gather(*streams))

    assert asyncio.run(follow_all()) == [200] * 2 + [429] * 10


def test_tenants_leave_room_for_each_other_and_for_an_admin() -> None:
    free, places = MAX_FOLLOWERS, []
    for _ in range(8):
        own = 0
        while own < own_places(free):
            own, free = own + 1, free - 1
        places.append(own)
    assert places[:5] == [16, 16, 12, 6, 3]
    assert all(places[:6])
    assert free >= KEPT_PLACES


def test_a_wrong_last_event_id_is_named(stack: Stack) -> None:
    url, headers = f"{stack.url}/kv/events", {"authorization": "Bearer root"}
    wrong = httpx.get(url, headers={**headers, "last-event-id": "x"}, timeout=20)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_others_get_on_between_the_parts_of_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHUNK", 1)
    cache, turns = FakeCache(), 0
    cache.store([1] * 16 * 50)

    async def ask(message: Callable[[int], Any], timeout: float) -> Any:
        return cache.answer(message(0))

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def follow() -> int:
        backend: Any = SimpleNamespace(ask=ask)
        context: Any = SimpleNamespace(backend=backend)
        follower = Follower(context, Collector(backend), "")
        await follower._collector.collect("", tier=True)
        task = asyncio.create_task(other())
        before = turns
        parts = [piece async for piece in follower._snapshot(FRESH)]
        task.cancel()
        assert len(parts) == 50
        return turns - before

    assert asyncio.run(follow()) >= 49


def test_a_frontend_that_is_asked_to_stop_does_not_wait_for_its_followers() -> None:
    """They have no end; its drain time is for answers that do."""
    with Stack() as stack:
        port = free_port()
        process = start(Path(stack.pool_directory), port, "--drain-seconds=600")
        try:
            wait_until(lambda: alive(port), "health")
            wait_until(lambda: len(stack.manager._sessions) == 2, "its Hello")
            with httpx.stream("GET", f"http://127.0.0.1:{port}/kv/events", timeout=20) as answer:
                lines = answer.iter_lines()
                assert next(lines) == "event: snapshot"
                process.send_signal(signal.SIGTERM)
                assert "event: error" in [*lines]
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.communicate()


def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again, though its connection is still open."""
    monkeypatch.setattr(events, "MAX_FOLLOWERS", 1)
    with Stack(client_timeout_seconds=0.5, send_buffer=4096) as stack:
        url, cache = f"{stack.url}/kv/events", stack.manager.cache
        port = int(stack.url.rsplit(":", 1)[1])
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(b"GET /kv/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            wait_until(lambda: httpx.head(url, timeout=20).status_code == 429, "its place taken")
            for _ in range(400):
                stack.do(lambda: [cache.remove(number, "evict") for number in cache.store([1] * 48)])
            wait_until(lambda: httpx.head(url, timeout=20).status_code == 200, "its place free")
