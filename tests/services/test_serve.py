"""`pagekeeper serve` around its supervisor: what it starts, the port, what it says, what it cleans up."""

import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runner.config import RunnerConfig
from services.supervisor.ready import curl_line, fetch, reason, url_of
from services.supervisor.serve import RUNNER_LOCK, bind, commands, sweep
from services.supervisor.serve_config import ServeConfig


def test_the_supervisor_knows_the_lock_that_a_runner_without_a_name_takes() -> None:
    assert RunnerConfig().full_name == RUNNER_LOCK.format(pid=os.getpid())
    started = commands(ServeConfig(pool_directory="/pool/{x}"), "/model", 1, {"PAGEKEEPER_NAME": "mine"})
    assert [command.lock.format(pid=7) for command in started] == [
        "/pool/{x}/locks/manager",
        f"/pool/{{x}}/locks/{RUNNER_LOCK.format(pid=7)}",
        "/pool/{x}/locks/frontend-0",
    ]
    assert "PAGEKEEPER_NAME" not in started[1].environ


def test_one_manager_and_as_many_runners_and_frontends_as_asked() -> None:
    config = ServeConfig(
        runners=2, frontends=3, pool_directory="/dev/shm/x/y", pool_bytes=123, reset_pool=True
    )
    environ = {"PAGEKEEPER_DTYPE": "float32", "PAGEKEEPER_RESET_POOL": "true", "PAGEKEEPER_PORT": "1"}
    started = commands(config, "/model", 8123, environ)
    assert [command.child.name for command in started] == [
        *("kvmanager", "runner-0", "runner-1"),
        *("frontend-0", "frontend-1", "frontend-2"),
    ]
    for command in started:
        assert command.environ["PAGEKEEPER_DTYPE"] == "float32"
        assert command.environ["PAGEKEEPER_MODEL"] == "/model"
        assert command.environ["PAGEKEEPER_PORT"] == "8123"
        assert command.environ["PAGEKEEPER_POOL_DIRECTORY"] == "/dev/shm/x/y"
        assert "PAGEKEEPER_RESET_POOL" not in command.environ  # else a restarted manager would empty the pool
    assert [command.first for command in started if command.first] == [{"PAGEKEEPER_RESET_POOL": "true"}]
    stages = {command.argv[-1]: command.child.stage for command in started}
    assert stages["services"] < stages["gpu_runner"] < stages["kvmanager"]


def test_two_runners_share_the_cores_unless_told_otherwise() -> None:
    def threads(runners: int, **environ: str) -> str | None:
        return commands(ServeConfig(runners=runners), "/model", 1, environ)[1].environ.get(
            "PAGEKEEPER_THREADS"
        )

    assert threads(1) is None
    assert threads(2) == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert threads(2, PAGEKEEPER_THREADS="7") == "7"


def test_the_port_is_held_for_servers_that_share_it_and_no_others() -> None:
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with socket.socket() as frontend:
            frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            frontend.bind(("127.0.0.1", port))
            frontend.listen()
            with pytest.raises(OSError, match=f"port {port}: .*in use"):
                bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(OSError, match=r"no-such-host\.invalid"):
        bind("no-such-host.invalid", 8000)


def test_a_taken_port_is_one_clear_line_and_status_2() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "services.cli", "serve", f"--port={port}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.startswith("pagekeeper serve: cannot listen on host '127.0.0.1'")
    assert answer.stderr.count("\n") == 1


def leftovers(pool: Path) -> list[Path]:
    for name in ("locks/runner-1", "sockets/manager.sock", "metrics/frontend-0.counters", "kv.bin"):
        path = pool / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"")
    return [path for path in pool.rglob("*") if path.is_file()]


def test_sweep_leaves_only_the_pool(tmp_path: Path) -> None:
    leftovers(tmp_path)
    sweep(str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "kv.bin"]
    sweep(str(tmp_path / "never-made"))


def test_sweep_spares_files_of_others_in_a_directory_that_was_named_by_mistake(tmp_path: Path) -> None:
    for name in ("locks/notes.txt", "locks/old/x", "sockets/a.sock", "metrics/results.csv", "metrics/old/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("theirs")
    there = sorted(tmp_path.rglob("*"))
    sweep(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == there


@contextlib.contextmanager
def lock_holder(lock: Path) -> Iterator[None]:
    """Another process that holds the lock file."""
    program = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.communicate()


def test_sweep_spares_a_pool_that_somebody_uses(tmp_path: Path) -> None:
    there = leftovers(tmp_path)
    with lock_holder(tmp_path / "locks/runner-1"):
        sweep(str(tmp_path))
        assert all(path.exists() for path in there)
    sweep(str(tmp_path))
    assert not (tmp_path / "locks/runner-1").exists()


def test_a_pool_that_is_in_use_is_one_clear_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    with lock_holder(tmp_path / "locks/manager"):
        command = [sys.executable, "-m", "services.cli", "serve", f"--pool-directory={tmp_path}", "--port=0"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert f"{tmp_path} is in use by another KV manager" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_urls_reach_a_server_that_listens_everywhere() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("example.org", 80) == "http://example.org:80"


def test_the_curl_line_is_one_that_a_shell_takes_apart_rightly() -> None:
    models = json.dumps({"data": [{"id": "it's/a model"}]}).encode()
    words = shlex.split(curl_line("http://127.0.0.1:80", (200, models)))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:80/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's/a model"
    assert body["stream"] is True
    assert "Authorization: Bearer $API_KEY" in curl_line("http://h:1", (401, b"{}"))
    assert "model" not in json.loads(shlex.split(curl_line("http://h:1", (401, b"{}")))[-1])


def test_a_look_at_a_server_never_raises_and_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervisor.ready.LOOK_SECONDS", 0.2)
    answers = [b'HTTP/1.1 503 No\r\nA: b\r\n\r\n{"error": {"message": "no runner"}}', b"garbage", None]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = answers.pop(0)
        if text is not None:
            writer.write(text)
            writer.close()

    async def main() -> list[tuple[int, bytes]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        seen = [await fetch("127.0.0.1", port, "/ready") for _ in range(3)]
        server.close()
        return [*seen, await fetch("127.0.0.1", port, "/ready")]

    good, garbage, silent, closed = asyncio.run(main())
    assert good[0] == 503
    assert reason(good[1]) == "no runner"
    assert [garbage[0], silent[0], closed[0]] == [0, 0, 0]
    assert reason(b"not JSON") == ""
