"""A process that is stopped is not dead: nothing of its is reused; it goes on, or it is replaced."""

import os
import signal

import httpx

from tests.e2e.server import Server, wait_until
from tests.e2e.streams import Streams


def used_blocks(server: Server) -> float:
    return server.metrics()["pagekeeper_used_blocks"]


def test_a_stopped_runner_is_waited_for_and_then_replaced() -> None:
    with (
        Server(stuck_seconds=1, kill_stuck_seconds=8, healthy_seconds=1) as server,
        Streams(server, max_tokens=60) as streams,
    ):
        (runner,) = server.children("gpu_runner")
        os.kill(runner, signal.SIGSTOP)
        wait_until(lambda: not server.ready(), "no longer ready")
        reason = httpx.get(f"{server.url}/ready", timeout=5).json()["error"]["message"]
        assert f"-{runner} (silent for" in reason
        assert (streams.running, used_blocks(server) > 0) == (4, True)
        os.kill(runner, signal.SIGCONT)
        wait_until(server.ready, "ready again")
        os.kill(runner, signal.SIGSTOP)
        wait_until(lambda: server.children("gpu_runner") not in ([], [runner]), "another runner", 60)
        streams.check()
        wait_until(lambda: used_blocks(server) == 0, "no block leaked")
    assert any("has made no progress for 8 s: killed" in line for line in server.output)
