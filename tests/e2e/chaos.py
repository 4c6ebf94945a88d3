"""Chaos with real processes: resumable streams, and a random process killed every second.

`python -m tests.e2e.chaos --seconds 60 --streams 16 --rounds 5`: in each round every stream must be complete
and equal to the undisturbed run, and at its end no block is held, the audit is clean and no process or file
is left over. Exit status 1 with the reasons if not.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any, Final

import httpx

from tests.e2e.server import Server, wait_until

KINDS: Final = ("gpu_runner", "gpu_runner", "kvmanager", "services")
PROMPTS: Final = ("The history of the city begins", "Once upon a time there was", "A list of colours: red,")
MAX_TOKENS: Final = 48
ASKS: Final = 8  # different ones
GIVE_UP: Final = 120.0  # seconds that a stream may take without a new event
PAUSE: Final = 0.1  # seconds between two tries
NO_ERROR: Final = ("stopping", "journal_unavailable")  # codes of what ends an answer only: ask again


def ask(number: int) -> dict[str, Any]:
    """One of ASKS requests: greedy ones, and sampled ones with a seed."""
    greedy = number % 4 == 0
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0 if greedy else 0.9,
        "seed": number,
    }


class Follower:
    """One client: runs resumable streams, one after the other, until `stop`; `faults` says what was wrong.

    Times are in seconds of the monotonic clock.
    """

    def __init__(self, server: Server, number: int, undisturbed: list[str]) -> None:
        self._server = server
        self._undisturbed = undisturbed
        self._random = random.Random(number)
        self.stop = False
        self.complete = 0
        self.reconnects = 0
        self.longest = 0.0  # seconds without an event
        self.at = 0.0  # when the last one came
        self.faults: list[str] = []
        self.thread = threading.Thread(target=self._run, name=f"stream-{number}")

    def _run(self) -> None:
        try:
            while not self.stop:
                number = self._random.randrange(ASKS)
                text = self._stream(number)
                self.complete += 1
                if text != self._undisturbed[number]:
                    self.faults.append(f"ask {number}: {text!r} instead of {self._undisturbed[number]!r}")
        except Exception as error:
            self.faults.append(repr(error))

    def _stream(self, number: int) -> str:
        """The whole text of one stream, over however many connections."""
        texts: list[str] = []
        self._id, self._last, self.at = "", 0, time.monotonic()
        while not self._connect(number, texts):
            assert time.monotonic() - self.at < GIVE_UP, f"no event for {GIVE_UP} s after {texts}"
            self.reconnects += 1
            threading.Event().wait(PAUSE)
        return "".join(texts)

    def _connect(self, number: int, texts: list[str]) -> bool:
        """One connection; whether the stream is over."""
        url, body = f"{self._server.url}/v1/completions", {**ask(number), "model": self._server.model}
        body |= {"stream": True, "stream_options": {"resumable": True}}
        try:
            if self._id:
                url, headers = f"{self._server.url}/v1/streams/{self._id}", {"last-event-id": str(self._last)}
                answering = httpx.stream("GET", url, headers=headers, timeout=20)
            else:
                answering = httpx.stream("POST", url, json=body, timeout=20)
            with answering as answer:
                if answer.status_code != 200:
                    text = answer.read().decode()
                    assert answer.status_code == 503, f"{answer.status_code}: {text}"
                    return False
                self._id = answer.headers["x-stream-id"]
                return self._read(answer, texts)
        except httpx.TransportError:
            return False

    def _read(self, answer: httpx.Response, texts: list[str]) -> bool:
        number = 0
        for line in answer.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                if number:
                    assert number == self._last + 1, f"event {number} after {self._last}"
                    now = time.monotonic()
                    self.longest, self.at = max(self.longest, now - self.at), now
                    self._last = number
                if line == "data: [DONE]":
                    return bool(number)
                self._take(json.loads(line[6:]), texts)
                number = 0
        return False

    def _take(self, data: dict[str, Any], texts: list[str]) -> None:
        if "error" in data:
            assert data["error"]["code"] in NO_ERROR, data
            return
        texts += [choice["text"] for choice in data["choices"]]


class Killer:
    """Kills a random process once a second."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self.kills: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        until, pause = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < until:
            kind = self._random.choice(KINDS)
            processes = self._server.children(kind)
            if processes:
                os.kill(self._random.choice(processes), signal.SIGKILL)
                self.kills[kind] += 1
            pause.wait(1.0)


def leftovers(server: Server) -> list[str]:
    """Files in the pool directory, after a stop, that are not the pool's."""
    pool = {"kv.bin", "blocks.meta", "layout.json"}
    found = [path for path in server.pool_directory.rglob("*") if path.is_file() and path.name not in pool]
    return [str(path.relative_to(server.pool_directory)) for path in found if path.parent.name != "streams"]


def chaos_round(seconds: float, streams: int, seed: int) -> list[str]:
    """One round on a service of its own; returns what was wrong, and prints what happened."""
    with Server(runners=2, frontends=2, healthy_seconds=0, checked=False) as server:
        undisturbed = [server.text(**ask(number)) for number in range(ASKS)]
        followers = [Follower(server, seed * 1000 + number, undisturbed) for number in range(streams)]
        for follower in followers:
            follower.thread.start()
        killer = Killer(server, seed)
        killer.run(seconds)
        for follower in followers:
            follower.stop = True
        for follower in followers:
            follower.thread.join(2 * GIVE_UP)
        faults = [fault for follower in followers for fault in follower.faults]
        faults += [f"{f.thread.name} does not end" for f in followers if f.thread.is_alive()]
        faults += settled(server)
        status = server.stop()
    faults += [f"exit status {status}"] if status else []
    faults += [f"left over: {name}" for name in leftovers(server)]
    complete = sum(follower.complete for follower in followers)
    reconnects = sum(follower.reconnects for follower in followers)
    silence = max(follower.longest for follower in followers)
    print(
        f"seed {seed}: {complete} streams complete, {reconnects} reconnects, longest silence {silence:.1f} s"
        f", kills {dict(killer.kills)}, {len(faults)} faults",
        flush=True,
    )
    return faults


def settled(server: Server) -> list[str]:
    """After the last stream: no block is held, and the audit is clean."""
    try:
        wait_until(server.ready, "ready again", 60)
        wait_until(lambda: server.metrics().get("pagekeeper_used_blocks") == 0, "no block leaked", 30)
    except AssertionError as error:
        return [str(error)]
    audit = httpx.get(f"{server.url}/kv/audit", timeout=20).json()
    return [] if audit.get("ok") else [f"audit: {audit}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long processes are killed, per round"
    )
    parser.add_argument("--streams", type=int, default=16, help="streams at once")
    parser.add_argument("--seed", type=int, default=1, help="the first round's; it decides who is killed")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, each with the next seed")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.rounds):
        faults = chaos_round(options.seconds, options.streams, seed)
        failed += bool(faults)
        for fault in faults:
            print(f"  seed {seed}: {fault}", flush=True)
    print(f"{options.rounds - failed} of {options.rounds} rounds without a fault")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
