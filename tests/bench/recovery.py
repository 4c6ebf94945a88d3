"""`python -m tests.bench.recovery`: how long streams are silent when a process dies, or all are restarted.

Real processes, resumable streams all the time. For each kind of death: kill, and take the longest silence
that any stream had before all go on; p50 and max over the repetitions. Then the same while every process is
restarted in turn, beside the bound that ARCHITECTURE.md states. Texts are compared as well. Exit status 1 if
one is wrong, or a rolling restart was silent for longer than that bound.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import psutil

from tests.e2e.chaos import ASKS, Follower, ask
from tests.e2e.server import Server, wait_until

ALL = (("gpu_runner", 2), ("kvmanager", 1), ("services", 2))
DEATHS: dict[str, tuple[tuple[str, int], ...]] = {
    "one runner of two": (("gpu_runner", 1),),
    "all runners": (("gpu_runner", 2),),
    "the manager": (("kvmanager", 1),),
    "one frontend of two": (("services", 1),),
    "all of them": ALL,
}
ROLLING = "a rolling restart"
BOUND = 5.0  # seconds of silence in a rolling restart, where there are two runners and two frontends


def flowing(followers: list[Follower], since: float) -> bool:
    """Whether every stream has had an event since then. AssertionError if one has ended with a fault."""
    faults = [fault for follower in followers for fault in follower.faults]
    assert not faults, faults
    return all(follower.at > since for follower in followers)


def settle(server: Server, followers: list[Follower]) -> None:
    """All processes are there, serve, and every stream flows."""
    wait_until(lambda: all(len(server.children(kind)) == count for kind, count in ALL), "all processes", 120)
    wait_until(server.ready, "ready", 120)
    wait_until(lambda: server.metrics().get("pagekeeper_ready_runners") == 2, "both runners", 120)
    settled = time.monotonic()
    wait_until(lambda: server.ready() and flowing(followers, settled), "streams that flow", 120)


def silence(server: Server, followers: list[Follower], disturb: Callable[[], None]) -> float:
    """Disturb, wait until all is as before; the longest silence in seconds."""
    settle(server, followers)
    for follower in followers:
        follower.longest = 0.0
    began = time.monotonic()
    disturb()
    wait_until(lambda: flowing(followers, began), "streams that go on", 120)
    settle(server, followers)
    return max(follower.longest for follower in followers)


def kill(server: Server, death: tuple[tuple[str, int], ...]) -> None:
    for kind, count in death:
        for process in random.sample(server.children(kind), count):
            os.kill(process, signal.SIGKILL)


def restart_all(server: Server, followers: list[Follower]) -> None:
    """SIGTERM to each process, the next one once its successor serves."""
    for process in [process for kind, _ in ALL for process in server.children(kind)]:
        os.kill(process, signal.SIGTERM)
        wait_until(lambda gone=process: not psutil.pid_exists(gone), "the end of a process", 120)
        settle(server, followers)


def report(name: str, times: list[float]) -> None:
    print(f"{name:20} silent for {median(times):.2f} s (p50), {max(times):.2f} s (max)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recovery", description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="deaths of each kind")
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--rolling", action="store_true", help="only the rolling restarts")
    options = parser.parse_args()
    with Server(runners=2, frontends=2, healthy_seconds=0, checked=False) as server:
        undisturbed = [server.text(**ask(number)) for number in range(ASKS)]
        followers = [Follower(server, number, undisturbed) for number in range(options.streams)]
        for follower in followers:
            follower.thread.start()
        try:
            for name, death in ({} if options.rolling else DEATHS).items():
                kills = partial(kill, server, death)
                report(name, [silence(server, followers, kills) for _ in range(options.times)])
            restarts = partial(restart_all, server, followers)
            rolling = [silence(server, followers, restarts) for _ in range(options.times)]
            report(ROLLING, rolling)
        finally:
            for follower in followers:
                follower.stop = True
            for follower in followers:
                follower.thread.join(120)
    faults = [fault for follower in followers for fault in follower.faults]
    print(*faults, f"{sum(f.complete for f in followers)} streams complete, {len(faults)} faults", sep="\n")
    within = max(rolling) <= BOUND
    print(
        f"{ROLLING}: {max(rolling):.2f} s, {'within' if within else 'OVER'} the stated bound of {BOUND:g} s"
    )
    return 0 if within and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
