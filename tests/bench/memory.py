"""Peak memory of the served processes, without the pool.

The pool is shared memory (with some small counters, all that is there). What a process has beyond it is
RssAnon + RssFile of /proc/PID/status: its own pages, and the files that it maps (libraries, weights). Pages
that several processes share are counted in each. A look costs microseconds: it disturbs nothing.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.25
KINDS = {"kvmanager": "kv manager", "gpu_runner": "runner", "services": "frontend"}
"""Module in a child's command line → what to call it."""


def beyond_pool(pid: int) -> int:
    """Bytes. Raises OSError if the process is gone."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024


def served(supervisor: int) -> dict[str, int]:
    """Name → process id of the supervisor itself and of the processes that it started."""
    found = {"supervisor": supervisor}
    for child in psutil.Process(supervisor).children():
        kind = next((KINDS[word] for word in child.cmdline() if word in KINDS), "other")
        same = sum(name.startswith(kind) for name in found)
        found[f"{kind} {same + 1}" if same else kind] = child.pid
    return found


class Peaks:
    """Samples `processes` (name → pid) until `stop`; `peaks` and `now` are bytes by name."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self.peaks = dict.fromkeys(processes, 0)
        self.now: dict[str, int] = {}
        self._task = asyncio.get_running_loop().create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_SECONDS)

    def look(self) -> None:
        """One sample. Raises OSError if a process is gone: then the figures would mean nothing."""
        for name, pid in self._processes.items():
            self.now[name] = beyond_pool(pid)
            self.peaks[name] = max(self.peaks[name], self.now[name])

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.look()
