"""A session ends with the connection by which its Hello came: nobody knows what was lost on the way."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvmanager import server as server_module
from kvmanager.config import ManagerConfig
from kvmanager.liveness import HeldLock
from kvmanager.paths import lock_path, manager_endpoint
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Fenced,
    FrontendHello,
    Stats,
    StatsQuery,
    Welcome,
    decode_to_frontend,
    encode,
)

WAIT = 5000  # milliseconds


class AlwaysHeld:
    """A process cannot see its own locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode = 0

    def held(self) -> bool:
        return True

    def discard(self, path: Path) -> None:
        assert path == self.path

    def close(self) -> None:
        self.path = Path()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[server_module.Server]:
    monkeypatch.setattr(server_module, "WatchedLock", AlwaysHeld)
    server = server_module.Server(ManagerConfig(pool_directory=str(tmp_path)))
    lock = HeldLock(lock_path(str(tmp_path), "frontend"))
    yield server
    lock.release()
    server.close()


def ask(server: server_module.Server, client: "zmq.Socket[bytes]", session: bytes, message: Any) -> Any:
    client.send_multipart([session, encode(message)])
    assert server._socket.poll(WAIT)
    server._receive(math.inf)
    assert client.poll(WAIT)
    return decode_to_frontend(client.recv_multipart()[1])


def test_a_session_by_another_connection_is_fenced(server: server_module.Server, tmp_path: Path) -> None:
    hello = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc://tokens")
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for client in (first, second):
            client.setsockopt(zmq.LINGER, 0)
            client.connect(manager_endpoint(str(tmp_path)))
        welcome = ask(server, first, b"", hello)
        assert isinstance(welcome, Welcome)
        session = encode(welcome.session)
        assert isinstance(ask(server, first, session, StatsQuery(1)), Stats)
        assert isinstance(ask(server, second, session, StatsQuery(2)), Fenced)
        again = ask(server, second, b"", hello)
        assert isinstance(again, Welcome)
        assert again.session != welcome.session
        assert isinstance(ask(server, second, encode(again.session), StatsQuery(3)), Stats)


def test_the_last_that_a_process_has_said_is_read_before_its_death_counts(
    server: server_module.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc://tokens")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(manager_endpoint(str(tmp_path)))
        welcome = ask(server, client, b"", hello)
        assert isinstance(welcome, Welcome)
        client.send_multipart([encode(welcome.session), encode(StatsQuery(1))])
        assert server._socket.poll(WAIT)
        monkeypatch.setattr(AlwaysHeld, "held", lambda self: False)
        server._watch(0.0)
        assert client.poll(WAIT)
        assert isinstance(decode_to_frontend(client.recv_multipart()[1]), Stats)
        assert server._core.state.clients == {}


class Flood:
    """A socket on which there is always another message. Each takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def recv_multipart(self, flags: int) -> list[bytes]:
        self.now += 0.001
        return [b"somebody", b"", b"noise"]


def test_a_flood_of_messages_does_not_hold_up_the_look_at_who_lives(
    server: server_module.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death is known within 100 ms: that of a look, and that in which the last messages are read."""
    flood, looks = Flood(), list[float]()

    def watch(now: float) -> None:
        looks.append(now)
        server._stopping = len(looks) == 5

    with monkeypatch.context() as patch:
        patch.setattr(server_module, "time", flood)
        patch.setattr(server, "_socket", flood)
        patch.setattr(server, "_publisher", None)
        patch.setattr(server, "_poller", SimpleNamespace(poll=lambda timeout: [(flood, zmq.POLLIN)]))
        patch.setattr(server, "_watch", watch)
        server.run()
    message = 0.001
    for former, look in pairwise(looks):
        assert look - former <= server_module.TICK + 2 * message
    began = flood.now
    monkeypatch.setattr(AlwaysHeld, "held", lambda self: False)
    with monkeypatch.context() as patch:
        patch.setattr(server_module, "time", flood)
        patch.setattr(server, "_socket", flood)
        server._locks.put("frontend", server_module.WatchedLock(lock_path(str(tmp_path), "frontend")))
        server._watch(began)
    assert server_module.TICK + (flood.now - began) + 3 * message < 0.1
