"""The daemon as a real process, over real sockets: sessions, garbage, deaths, restarts and its end."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvmanager.client import AsyncManagerClient, ManagerClient, manager_endpoint
from kvmanager.errors import PagekeeperError
from kvmanager.liveness import WatchedLock
from kvmanager.paths import lock_path
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Directives,
    Fenced,
    FrontendHello,
    Layout,
    Progress,
    Ready,
    Rejected,
    RunnerHello,
    RunnerLost,
    Session,
    Stats,
    StatsQuery,
    StepReport,
    Welcome,
    encode,
)
from tests.kvmanager.fake_clients import LAYOUT, submission

DEADLINE = 20.0  # seconds; generous, nothing waits that long when all is well


class Daemon:
    """`python -m kvmanager` on a pool directory of its own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.process: subprocess.Popen[str] | None = None

    def start(self, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "kvmanager",
            f"--pool-directory={self.directory}",
            "--pool-bytes=8K",
            *flags,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def stop(self, signum: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and what it wrote to stderr."""
        assert self.process is not None
        self.process.send_signal(signum)
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors

    def runner(self, name: str = "runner", layout: Layout = LAYOUT) -> ManagerClient:
        client = ManagerClient("", RunnerHello(PROTOCOL_VERSION, name, name, layout, 4, 100), self.directory)
        try:
            assert client.connect(DEADLINE).num_blocks == 8192 // LAYOUT.block_bytes
        except PagekeeperError:
            client.close()
            raise
        client.send(Ready())
        return client

    def frontend(self, name: str = "frontend") -> ManagerClient:
        hello = FrontendHello(PROTOCOL_VERSION, name, name, "ipc:///tokens")
        client = ManagerClient("", hello, self.directory)
        client.connect(DEADLINE)
        return client


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="pk-") as directory:
        daemon = Daemon(f"{directory}/pool")
        daemon.start()
        yield daemon
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.communicate()


def wait_for(
    client: ManagerClient, kind: type[Any], where: Callable[[Any], bool] = lambda message: True
) -> Any:
    """The next message of this kind for which `where` holds."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        client.socket.poll(50)
        for message in client.receive():
            if isinstance(message, kind) and where(message):
                return message
    raise AssertionError(f"no {kind.__name__} within {DEADLINE} s")


def stats_when(client: ManagerClient, where: Callable[[Stats], bool]) -> Stats:
    """Ask until the answer is as expected."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        client.send(StatsQuery(1))
        answer: Stats = wait_for(client, Stats)
        if where(answer):
            return answer
    raise AssertionError(f"not within {DEADLINE} s; last: {answer}")


CLIENT = """
import sys, time
from kvmanager.client import ManagerClient
from kvmanager.protocol import *
from tests.kvmanager.fake_clients import LAYOUT, submission
kind, directory = sys.argv[1:]
if kind == "runner":
    hello = RunnerHello(PROTOCOL_VERSION, kind, kind + "-child", LAYOUT, 4, 100)
else:
    hello = FrontendHello(PROTOCOL_VERSION, kind, kind + "-child", "ipc:///tokens")
client = ManagerClient("", hello, directory)
client.connect(20)
client.send(Ready() if kind == "runner" else submission("child", [1] * 8))
while True:
    client.socket.poll(50)
    for message in client.receive():
        if isinstance(message, Directives) and message.starts:
            start = message.starts[0].start_id
            client.send(StepReport(progress=(Progress(start, 0, (), 9),), credits_wanted=2))
        print(type(message).__name__, flush=True)
"""


def spawn(kind: str, directory: str) -> "subprocess.Popen[str]":
    """A client process that will be killed."""
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, kind, directory], stdout=subprocess.PIPE, text=True
    )


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_a_request_runs_and_a_repeated_one_hits(daemon: Daemon) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        for name, cached in (("a", 0), ("b", 8)):
            frontend.send(submission(name, [1] * 9))
            assert wait_for(frontend, Accepted).request_id == name
            start = wait_for(runner, Directives, lambda message: message.starts).starts[0]
            assert (start.request_id, start.sequences[0].num_cached_tokens) == (name, cached)
            runner.send(StepReport(progress=(Progress(start.start_id, 0, (), 9),)))
            stats_when(frontend, lambda stats: stats.pool.sealed == 2)
        frontend.send(StatsQuery(5))
        stats = wait_for(frontend, Stats)
        assert (stats.query_id, stats.running, stats.prefix_cache_hits, len(stats.runners)) == (5, 2, 8, 1)


def test_a_killed_runners_blocks_come_back(daemon: Daemon) -> None:
    with daemon.frontend() as frontend:
        child = spawn("runner", daemon.directory)
        stats_when(frontend, lambda stats: bool(stats.runners) and stats.runners[0].ready)
        frontend.send(submission("a", [1] * 9))
        stats = stats_when(frontend, lambda stats: stats.pool.sealed == 2 and stats.pool.reserved == 3)
        assert stats.running == 1
        kill(child)
        assert wait_for(frontend, RunnerLost).requests == (("a", 0),)
        stats = stats_when(frontend, lambda stats: not stats.runners)
        assert (stats.pool.cached, stats.pool.free + 2) == (2, stats.pool.num_blocks)
        assert not lock_path(daemon.directory, "runner-child").exists()


def test_a_killed_frontends_requests_are_cancelled(daemon: Daemon) -> None:
    with daemon.runner() as runner:
        child = spawn("frontend", daemon.directory)
        start = wait_for(runner, Directives).starts[0]
        kill(child)
        assert wait_for(runner, Directives, lambda message: message.cancels).cancels == (start.start_id,)


def test_garbage_is_dropped_and_counted_and_harms_nobody(daemon: Daemon) -> None:
    with daemon.runner(), daemon.frontend() as frontend, zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(manager_endpoint(daemon.directory))
        session = encode(frontend.session)
        garbage = [
            [b"one frame"],
            [b"", b"three", b"frames"],
            [b"", b"\xc1"],
            [b"", b""],
            [b"", encode(Cancel("a", 0))],
        ]
        for frames in garbage:
            stranger.send_multipart(frames)
        for body in (b"\x91" * 100_000, encode(Ready())):
            frontend.socket.send_multipart([session, body])
        stranger.send_multipart([b"unknown", b"body"])
        assert stranger.poll(int(DEADLINE * 1000))
        assert stranger.recv_multipart()[0] == b"unknown"
        stats_when(frontend, lambda stats: stats.dropped_messages == len(garbage) + 2)
        stranger.close()


def test_a_stale_session_is_fenced_and_a_new_hello_mends_it(daemon: Daemon) -> None:
    with daemon.runner() as runner:
        old = runner.session
        assert isinstance(old, Session)
        assert daemon.stop(signal.SIGKILL)[0] == -signal.SIGKILL
        daemon.start()
        fenced = wait_for(runner, Fenced)
        assert fenced.boot_id != old.boot_id
        assert runner.session is None
        assert runner.connect(DEADLINE).session.boot_id == fenced.boot_id


def test_a_killed_manager_starts_warm(daemon: Daemon) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        frontend.send(submission("a", [1] * 9))
        start = wait_for(runner, Directives).starts[0]
        runner.send(StepReport(progress=(Progress(start.start_id, 0, (), 9),), credits_wanted=1))
        wait_for(runner, Directives)
        daemon.stop(signal.SIGKILL)
        lock_path(daemon.directory, "killed-as-well").touch()
        daemon.start()
        for client in (frontend, runner):
            wait_for(client, Fenced)
            client.connect(DEADLINE)
        assert not lock_path(daemon.directory, "killed-as-well").exists()
        stats = stats_when(frontend, lambda stats: stats.pool.quarantined == 2)
        assert stats.pool.cached == 2
        runner.send(Ready())
        stats_when(frontend, lambda stats: stats.pool.quarantined == 0)
        frontend.send(submission("a", [1] * 9))
        start = wait_for(runner, Directives).starts[0]
        assert start.sequences[0].num_cached_tokens == 8


def test_sigterm_ends_cleanly_and_leaves_only_the_pool(daemon: Daemon) -> None:
    with daemon.runner():
        status, errors = daemon.stop()
    assert status == 0
    assert "event=stop" in errors
    assert "Traceback" not in errors
    root = Path(daemon.directory)
    assert sorted(path.name for path in root.iterdir()) == [
        "blocks.meta",
        "kv.bin",
        "layout.json",
        "locks",
        "sockets",
    ]
    assert list((root / "locks").iterdir()) == list((root / "sockets").iterdir()) == []


def test_a_second_manager_is_refused_with_one_line(daemon: Daemon) -> None:
    with daemon.frontend():
        command = [sys.executable, "-m", "kvmanager", f"--pool-directory={daemon.directory}"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert "locks/manager is locked by another process" in second.stderr


def test_another_layout_is_refused_and_reset_empties_the_pool(daemon: Daemon) -> None:
    other = Layout("other", "float32", 4, 1, 1, 2)
    daemon.runner().close()
    with pytest.raises(PagekeeperError, match="another layout") as caught:
        daemon.runner(layout=other)
    assert caught.value.code == "other_layout"
    daemon.stop()
    daemon.start("--reset-pool")
    daemon.runner(layout=other).close()
    assert "event=pool_discarded reason='reset_pool'" in daemon.stop()[1]


def test_a_pool_that_cannot_be_made_is_refused_to_the_runner(daemon: Daemon) -> None:
    with pytest.raises(PagekeeperError, match="pool_bytes=8192 is less than one block"):
        daemon.runner(layout=Layout("large", "float32", 4096, 1, 1, 2))
    with pytest.raises(PagekeeperError, match="has no bytes"):
        daemon.runner(layout=Layout("empty", "float32", 4, 0, 1, 2))
    (Path(daemon.directory) / "kv.bin").mkdir()
    with pytest.raises(PagekeeperError, match=r"kv\.bin"):
        daemon.runner()
    (Path(daemon.directory) / "kv.bin").rmdir()
    daemon.runner().close()


def test_a_directory_that_cannot_be_read_is_said_in_one_line(daemon: Daemon) -> None:
    daemon.frontend().close()
    daemon.stop()
    (Path(daemon.directory) / "layout.json").mkdir()
    daemon.start()
    assert daemon.process is not None
    _, errors = daemon.process.communicate(timeout=DEADLINE)
    assert daemon.process.returncode == 1
    assert errors.count("\n") == 1
    assert "layout.json is no file of a pool (Is a directory); move it away" in errors


def test_a_hello_without_a_held_lock_is_refused(daemon: Daemon) -> None:
    with daemon.frontend(), zmq.Context() as context:
        (Path(daemon.directory) / "locks" / "free").touch()
        for lock, words in (
            ("free", b"does not hold"),
            ("absent", b"cannot be opened"),
            ("manager", b"is the manager's"),
            ("a\0b", b"cannot be opened"),
        ):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(manager_endpoint(daemon.directory))
            socket.send_multipart([b"", encode(FrontendHello(PROTOCOL_VERSION, "x", lock, "e"))])
            assert socket.poll(int(DEADLINE * 1000))
            assert words in socket.recv_multipart()[1]
            socket.close()
        manager = WatchedLock(lock_path(daemon.directory, "manager"))
        assert manager.held()
        manager.close()


def test_an_endpoint_that_cannot_be_bound_is_said_in_one_line(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("--manager=tcp://256.0.0.1:1")
    assert daemon.process is not None
    _, errors = daemon.process.communicate(timeout=DEADLINE)
    assert daemon.process.returncode == 1
    assert "cannot listen on tcp://256.0.0.1:1" in errors


def test_an_async_client_speaks_the_same(daemon: Daemon) -> None:
    async def talk() -> None:
        client = AsyncManagerClient("", FrontendHello(PROTOCOL_VERSION, "f", "f", "e"), daemon.directory)
        await client.connect(DEADLINE)
        await client.send(submission("a", [1]))
        messages: list[Any] = []
        while not messages:
            messages = await client.receive()
        assert isinstance(messages[0], Rejected)
        assert messages[0].code == "not_ready"
        daemon.stop(signal.SIGKILL)
        daemon.start()
        while not any(isinstance(message, Fenced) for message in messages):
            messages = await client.receive()
        assert client.session is None
        await client.connect(DEADLINE)
        client.close()
        client.close()

    asyncio.run(asyncio.wait_for(talk(), DEADLINE))


def test_an_absent_manager_is_said_within_the_timeout(tmp_path: Path) -> None:
    hello = FrontendHello(PROTOCOL_VERSION, "f", "f", "e")
    endpoint = f"ipc://{tempfile.gettempdir()}/pk-absent-{os.getpid()}"
    with ManagerClient(endpoint, hello, str(tmp_path / "a")) as client:
        with pytest.raises(PagekeeperError, match=r"did not answer a Hello within 0\.05 s") as caught:
            client.connect(0.05)
        assert caught.value.code == "manager_absent"

    async def ask() -> None:
        client = AsyncManagerClient(endpoint, hello, str(tmp_path / "b"))
        try:
            await client.connect(0.05)
        finally:
            client.close()

    with pytest.raises(PagekeeperError, match="did not answer"):
        asyncio.run(ask())


def test_a_client_whose_manager_takes_nothing_is_told(tmp_path: Path) -> None:
    hello = FrontendHello(PROTOCOL_VERSION, "f", "f", "e")
    endpoint = f"ipc://{tempfile.gettempdir()}/pk-absent-{os.getpid()}"
    with ManagerClient(endpoint, hello, str(tmp_path / "a")) as client:
        client._session.received([b"", encode_welcome()])
        for _ in range(1000):
            client.send(Cancel("a", 0))
        with pytest.raises(PagekeeperError, match="1000 messages wait"):
            client.send(Cancel("a", 0))


def encode_welcome() -> bytes:
    return encode(Welcome(Session("boot", 1, 1), "/pool", 0))
