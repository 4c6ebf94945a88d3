"""`python -m tests.bench.detection`: how long after a runner's SIGKILL the manager says that it has died.

A real manager, and processes that hold a runner's session. Without other messages, and while another process
sends as many as it can. Exit status 1 if one death was known later than after BOUND.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

BOUND = 0.1  # seconds
WAIT = 20.0  # seconds; generous

MANAGER = ("-m", "kvmanager", "--pool-bytes=8K")
RUNNER = """
import sys
from kvmanager.client import ManagerClient
from kvmanager.protocol import PROTOCOL_VERSION, Ready, RunnerHello
from tests.kvmanager.fake_clients import LAYOUT
pool, name = sys.argv[1:]
with ManagerClient("", RunnerHello(PROTOCOL_VERSION, name, name, LAYOUT, 4, 100), pool) as client:
    client.connect(20)
    client.send(Ready())
    print("there", flush=True)
    while True:
        client.socket.poll(100)
        client.receive()
"""
FLOOD = """
import sys
import zmq
from kvmanager.client import ManagerClient
from kvmanager.protocol import PROTOCOL_VERSION, FrontendHello, StatsQuery
hello = FrontendHello(PROTOCOL_VERSION, "flood", "flood", "ipc:///nowhere")
with ManagerClient("", hello, sys.argv[1]) as client:
    client.connect(20)
    print("there", flush=True)
    while True:
        client.socket.poll(1000, zmq.POLLOUT)
        client.send(StatsQuery(1))
        client.receive()
"""


@contextmanager
def child(
    *argv: str, stdout: int | None = None, stderr: int | None = None
) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([sys.executable, *argv], text=True, stdout=stdout, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


def deaths(pool: str, flood: bool, times: int) -> list[float]:
    """Seconds from each SIGKILL to the manager's line."""
    with ExitStack() as stack:
        manager = stack.enter_context(child(*MANAGER, f"--pool-directory={pool}", stderr=subprocess.PIPE))
        names = [f"runner-{number}" for number in range(times)]
        argv = [("-c", RUNNER, pool, name) for name in names] + ([("-c", FLOOD, pool)] if flood else [])
        found = []
        for clients in argv:
            client = stack.enter_context(child(*clients, stdout=subprocess.PIPE))
            assert client.stdout is not None
            assert client.stdout.readline() == "there\n"
            found.append(client)
        assert manager.stderr is not None
        seconds = []
        for name, runner in zip(names, found[:times], strict=True):
            time.sleep(random.random() / 10)  # at any moment between two looks
            began = time.monotonic()
            os.kill(runner.pid, signal.SIGKILL)
            while f"event=died lock='{name}'" not in manager.stderr.readline():
                assert time.monotonic() < began + WAIT, f"the death of {name} was not noticed"
            seconds.append(time.monotonic() - began)
        assert all(client.poll() is None for client in found[times:]), "the flood has ended early"
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.detection", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="deaths of each kind")
    options = parser.parse_args()
    worst = 0.0
    for words, flood in (("an idle manager", False), ("a flood of messages", True)):
        with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as folder:
            seconds = deaths(str(Path(folder) / "pool"), flood, options.times)
        worst = max(worst, *seconds)
        print(
            f"{words:20} known after {median(seconds) * 1e3:.0f} ms (p50), {max(seconds) * 1e3:.0f} ms (max)"
        )
    print(f"{'within' if worst <= BOUND else 'OVER'} the bound of {BOUND * 1e3:.0f} ms")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
