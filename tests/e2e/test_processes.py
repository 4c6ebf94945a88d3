"""Signals to real processes: a clean stop leaves nothing, a killed one costs its clients only time."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.server import Server, wait_until
from tests.e2e.streams import PROMPT, Streams

BLOCK = 16  # tokens, the default block_size


def test_a_clean_stop_leaves_only_the_pool_and_the_next_start_is_warm_also_after_the_death_of_all() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pk-") as folder:
        pool = Path(folder) / "pool"
        with Server(pool) as server:
            text = server.text(PROMPT * 8, max_tokens=8)
            family = psutil.Process(server.process.pid).children(recursive=True)
            assert len(family) >= 3
            assert server.stop() == 0
        assert [child for child in family if child.is_running()] == []
        assert {path.name for path in pool.iterdir() if path.is_file()} == {
            "kv.bin",
            "blocks.meta",
            "layout.json",
        }
        assert [path for folder in pool.iterdir() if folder.is_dir() for path in folder.iterdir()] == []
        for _ in range(2):
            with Server(pool) as server:
                answer = server.complete(PROMPT * 8, max_tokens=8)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
                assert answer["choices"][0]["text"] == text
                supervisor = psutil.Process(server.process.pid)
                for process in (supervisor, *supervisor.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):  # the first death ends the others
                        process.kill()


def requests(server: Server, state: str) -> list[dict[str, Any]]:
    """Those of /kv/requests in this state."""
    found = httpx.get(f"{server.url}/kv/requests?state={state}&limit=100", timeout=10).json()
    return list(found["requests"])


def two_blocks_computed(server: Server) -> bool:
    """Whether every stream has."""
    sequences = [sequence for each in requests(server, "running") for sequence in each["sequences"]]
    return len(sequences) == 4 and min(sequence["num_computed"] for sequence in sequences) >= 2 * BLOCK


def test_a_killed_runner_costs_only_time_and_a_block_of_tokens() -> None:
    with Server(runners=2) as server:
        with Streams(server):
            wait_until(lambda: two_blocks_computed(server), "two blocks of each stream")
            os.kill(server.children("gpu_runner")[0], signal.SIGSEGV)  # SIGKILL is what chaos sends
        again = [each for each in requests(server, "ended") if each["attempt"] > 0]
        assert again
        for each in again:
            lookup = each["lookup"]
            cached = lookup["hit_blocks"] * BLOCK + lookup["copied_tokens"]
            assert lookup["num_tokens"] > 2 * BLOCK
            uncached = lookup["num_tokens"] - cached  # the last token among them, which nobody had computed
            assert uncached <= BLOCK + 1, each
        wait_until(server.ready, "ready again", 60)
        wait_until(lambda: server.metrics()["pagekeeper_used_blocks"] == 0, "no block leaked")


def test_a_killed_manager_costs_nothing() -> None:
    """Runners go on, and the next manager takes over what they run."""
    with Server(runners=2) as server:
        with Streams(server):
            wait_until(lambda: two_blocks_computed(server), "two blocks of each stream")
            os.kill(server.children("kvmanager")[0], signal.SIGKILL)
        assert server.metrics()["pagekeeper_resubmitted_requests_total"] == 0, "\n".join(server.output[-60:])
        wait_until(server.ready, "ready again", 60)
        wait_until(lambda: server.metrics()["pagekeeper_used_blocks"] == 0, "no block leaked")


def test_a_killed_frontend_releases_its_requests() -> None:
    with Server(frontends=1) as server:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # held: httpx closes the connection with its iterator
            next(lines)
            os.kill(server.children("services")[0], signal.SIGKILL)
        wait_until(server.ready, "a new frontend", 60)
        wait_until(lambda: server.metrics()["pagekeeper_used_blocks"] == 0, "the dead frontend's blocks back")
        assert server.text(PROMPT, max_tokens=4)
