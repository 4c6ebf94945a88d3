"""`python -m tests.bench.recovery`: how long streams are silent when a process is killed.

Real processes, resumable streams all the time. For each kind of death: kill, and take the longest silence
that any stream had before all go on; p50 and max over the repetitions. Texts are compared as well.
"""

import argparse
import os
import random
import signal
import sys
import time
from statistics import median

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


def flowing(followers: list[Follower], since: float) -> bool:
    """Whether every stream has had an event since then."""
    return all(follower.at > since for follower in followers)


def silence(server: Server, followers: list[Follower], death: tuple[tuple[str, int], ...]) -> float:
    """Kill, wait until all is as before; the longest silence in seconds."""
    began = time.monotonic()
    wait_until(lambda: server.ready() and flowing(followers, began), "streams that flow", 120)
    for follower in followers:
        follower.longest = 0.0
    killed = time.monotonic()
    for kind, count in death:
        for process in random.sample(server.children(kind), count):
            os.kill(process, signal.SIGKILL)
    wait_until(lambda: flowing(followers, killed), "streams that go on", 120)
    wait_until(lambda: all(len(server.children(kind)) == count for kind, count in ALL), "all processes", 120)
    settled = time.monotonic()
    wait_until(lambda: server.ready() and flowing(followers, settled), "streams that flow again", 120)
    return max(follower.longest for follower in followers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recovery", description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="deaths of each kind")
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    options = parser.parse_args()
    with Server(runners=2, frontends=2, healthy_seconds=0, checked=False) as server:
        undisturbed = [server.text(**ask(number)) for number in range(ASKS)]
        followers = [Follower(server, number, undisturbed) for number in range(options.streams)]
        for follower in followers:
            follower.thread.start()
        try:
            for name, death in DEATHS.items():
                times = [silence(server, followers, death) for _ in range(options.times)]
                print(
                    f"{name:20} silent for {median(times):.2f} s (p50), {max(times):.2f} s (max)", flush=True
                )
        finally:
            for follower in followers:
                follower.stop = True
            for follower in followers:
                follower.thread.join(120)
    faults = [fault for follower in followers for fault in follower.faults]
    print(*faults, f"{sum(f.complete for f in followers)} streams complete, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
