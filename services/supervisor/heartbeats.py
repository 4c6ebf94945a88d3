"""Which processes make no progress although they live: each touches its lock file as its loop turns.

Time is counted in looks, not in seconds: whoever looks may have stood still together with all that it looks
at. A process is judged from its second touch on, since what comes before (loading a model, compiling) has no
bound that would hold everywhere.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class _Seen:
    pid: int
    touched: int = 0  # nanoseconds, as last seen; 0 before that
    touches: int = 0
    still: int = 0  # looks since it was seen to be touched


class Heartbeats:
    """`patience`: looks at an untouched file after which its process is stuck; 0 never finds one stuck."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen: dict[str, _Seen] = {}

    def stuck(self, name: str, pid: int, lock: Path) -> bool:
        """One look at the child `name`, which is process `pid` now; true once for each process."""
        seen = self._seen.get(name)
        if seen is None or seen.pid != pid:
            seen = self._seen[name] = _Seen(pid)
        touched = modified(lock)
        if touched != seen.touched:
            seen.touched, seen.touches, seen.still = touched, seen.touches + 1, 0
        elif seen.touches > 1:
            seen.still += 1
        return 0 < self._patience == seen.still


def modified(path: Path) -> int:
    """When the file was last touched, in nanoseconds; 0 if there is none. It is not opened."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
