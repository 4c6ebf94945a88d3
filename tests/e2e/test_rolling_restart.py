"""Every process is asked to end in turn, under load: the supervisor starts another, and nothing is lost."""

import contextlib
import signal
import time

import psutil

from tests.e2e.server import Server, wait_until
from tests.e2e.streams import Streams


def restart(server: Server, kind: str) -> None:
    """SIGTERM to one process of this kind, again and again, until there is another in its place."""
    before = server.children(kind)
    pester(psutil.Process(before[0]))
    wait_until(
        lambda: before[0] not in server.children(kind) and len(server.children(kind)) == len(before),
        f"another {kind}",
        60,
    )
    wait_until(server.ready, "ready again", 60)


def pester(process: psutil.Process) -> None:
    """One SIGTERM after the other, until the process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)


def test_a_rolling_restart_loses_nothing() -> None:
    with Server(frontends=2, drain_seconds=120) as server, Streams(server, max_tokens=80) as streams:
        restart(server, "gpu_runner")
        assert streams.running == 4
        metrics = server.metrics()
        assert metrics["pagekeeper_resubmitted_requests_total"] == 0  # handed over, not lost
        assert metrics["pagekeeper_recomputed_tokens_total"] == 0
        restart(server, "kvmanager")
        for _ in range(2):
            restart(server, "services")
        streams.check()
        wait_until(lambda: server.metrics()["pagekeeper_used_blocks"] == 0, "no block leaked")
        assert [line for line in server.output if "was ended by" in line or "exited with" in line] == []
        pester(psutil.Process(server.process.pid))
        assert server.stop() == 0
