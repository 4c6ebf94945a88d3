"""`python -m services` as a process: settings, the port, signals, and two of them on one port."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.text.model_source import resolve
from tests.services.fake_stack import wait_until


@pytest.fixture
def pool() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as folder:
        yield Path(folder) / "pool"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start(pool: Path, port: int, *flags: str) -> "subprocess.Popen[str]":
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PAGEKEEPER_")}
    argv = [sys.executable, "-m", "services", f"--port={port}", f"--pool-directory={pool}", *flags]
    model = [] if any(flag.startswith("--model") for flag in flags) else [f"--model={resolve('')}"]
    return subprocess.Popen([*argv, *model], env=environ, stderr=subprocess.PIPE, text=True)


def alive(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def stop(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, log = process.communicate(timeout=20)
    return process.returncode, log


def files(pool: Path) -> list[Path]:
    return [path for path in pool.rglob("*") if not path.is_dir()]


def test_two_share_a_port_and_leave_nothing(pool: Path) -> None:
    port = free_port()
    pair = [start(pool, port, "--reuse-port") for _ in range(2)]
    try:
        wait_until(lambda: len(files(pool)) == 6, "socket, lock and counters of both")
        wait_until(lambda: alive(port), "health")
        assert stop(pair[0])[0] == 0
        wait_until(lambda: alive(port), "health of the other")
        assert len(files(pool)) == 3
        assert stop(pair[1], signal.SIGINT)[0] == 0
    finally:
        for process in pair:
            process.kill()
    assert files(pool) == []


def test_a_running_stream_may_end_after_sigterm_within_the_drain_time(pool: Path) -> None:
    """The manager is absent, so the request ends by its own bound, which is shorter than the drain time."""
    port = free_port()
    process = start(pool, port, "--manager-timeout-seconds=1", "--drain-seconds=15")
    try:
        wait_until(lambda: alive(port), "health")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            body = b'{"prompt": "x"}'
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + body
            )
            process.send_signal(signal.SIGTERM)
            assert b"503" in connection.recv(65536)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=70000"], "--port='70000' is not allowed"),
        (["--redis-url=nonsense"], "redis_url (or REDIS_URL) is not allowed: Redis URL must specify"),
        (["--model=/no/such/model"], "no model at /no/such/model"),
        (["--api-keys-file=/no/such/file"], "--api-keys-file='/no/such/file' cannot be read"),
    ],
)
def test_a_wrong_setting_is_status_2(pool: Path, flags: list[str], words: str) -> None:
    process = start(pool, 0, *flags)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 2
    assert words in log


def test_a_port_in_use_names_the_setting(pool: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = start(pool, port)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"--port={port}: Address already in use" in log


def test_a_name_that_is_taken_is_status_2(pool: Path) -> None:
    first = start(pool, 0, "--name=mine")
    try:
        wait_until(lambda: len(files(pool)) == 3, "the first one's files")
        second = start(pool, 0, "--name=mine")
        _, log = second.communicate(timeout=30)
        assert second.returncode == 2
        assert "locked by another process" in log
        assert len(files(pool)) == 3
        assert stop(first)[0] == 0
    finally:
        first.kill()
        first.communicate()


def test_a_pool_directory_too_long_for_a_socket_is_said_in_one_line(pool: Path) -> None:
    process = start(pool / ("x" * 100), free_port())
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert log.splitlines()[-1].endswith("choose a shorter pool_directory")
    assert "Traceback" not in log
