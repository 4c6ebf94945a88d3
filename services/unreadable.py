"""Messages that cannot be read: counted, and told of in the log now and then."""

import logging
from typing import Final

QUIET: Final = 10.0  # seconds between two lines

log = logging.getLogger("pagekeeper.frontend")


class Unreadable:
    """One socket's. `count` is all that there were."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.count = 0
        self._told = 0
        self._next_line = float("-inf")

    def add(self, now: float, why: str) -> None:
        """One more, at `now` (seconds of a steady clock)."""
        self.count += 1
        if now >= self._next_line:
            log.warning(
                "dropped %d %s that cannot be read, last: %s", self.count - self._told, self._what, why
            )
            self._told, self._next_line = self.count, now + QUIET
