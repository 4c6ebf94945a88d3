"""The disk tier's copies: a thread that moves blocks between the pool's data and the tier's file, so that
the manager's loop never waits for a disk.

    start(demotion or promotion)  →  queue, promotions first  →  thread  →  take() after `fileno` is readable

Blocks are read and written through `kv.bin` itself: the same pages that runners have mapped. A failure ends
that copy alone, with a line in the log.
"""

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from kvmanager.protocol import Layout
from kvmanager.tier.tier_file import TierFile, write_all
from kvmanager.tier.tiers import Copy

CLOSE_SECONDS: Final = 5.0  # how long the end waits for a copy under way

log = logging.getLogger("kvmanager")


class Finished(NamedTuple):
    """A copy is over. `seconds` of copying, without the wait in the queue."""

    copy: Copy
    promotion: bool
    good: bool
    seconds: float


class DiskTier:
    """The open file and its thread. Raises PagekeeperError ("internal") if the file cannot be used.

    At most `max_copies` wait; one more fails at once.
    """

    def __init__(
        self, path: str, disk_bytes: int, layout: Layout, pool_data: Path, max_copies: int = 1 << 20
    ) -> None:
        self._file = TierFile(path, disk_bytes, layout)
        self.num_slots = self._file.num_slots
        self.kept = self._file.kept
        self.note = self._file.note
        self._pool = os.open(pool_data, os.O_RDWR | os.O_CLOEXEC)
        self._buffer = bytearray(self._file.block_bytes)
        self._max_copies = max_copies
        self._condition = threading.Condition()
        self._demotions: deque[Copy | int] = deque()  # a number is a slot to erase
        self._promotions: deque[Copy] = deque()
        self._finished: deque[Finished] = deque()
        self._failing = False  # the last copy failed, and the log says so
        self._closing = False
        self.fileno = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when `take` has something."""
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    def demote(self, copy: Copy) -> None:
        """Write a block of the pool, which nobody writes until this is over, to its slot."""
        self._start(copy, promotion=False)

    def promote(self, copy: Copy) -> None:
        """Fill a block of the pool, which nobody else touches until this is over, from its slot."""
        self._start(copy, promotion=True)

    def erase(self, slot: int) -> None:
        """Forget what the slot holds, after the demotions that were begun before."""
        with self._condition:
            self._demotions.append(slot)
            self._condition.notify()

    def take(self) -> list[Finished]:
        """What is over since the last call."""
        try:
            os.eventfd_read(self.fileno)
        except BlockingIOError:
            return []
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Drop the copies that wait, and end the thread after the one that it is at; the file stays.

        Safe to call twice. A copy that takes the disk longer than `CLOSE_SECONDS` is left behind, files open.
        """
        with self._condition:
            if self._closing:
                return
            self._closing = True
            self._condition.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("event=tier_left_behind seconds=%g", CLOSE_SECONDS)
            return
        for job in self._demotions:
            if isinstance(job, int):
                self._erase(job)
        self._file.close()
        os.close(self._pool)
        os.close(self.fileno)

    def _start(self, copy: Copy, promotion: bool) -> None:
        with self._condition:
            if len(self._demotions) + len(self._promotions) < self._max_copies:
                (self._promotions if promotion else self._demotions).append(copy)
                self._condition.notify()
                return
        self._end(Finished(copy, promotion, False, 0.0))

    def _end(self, finished: Finished) -> None:
        self._finished.append(finished)
        os.eventfd_write(self.fileno, 1)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            copy, promotion = job
            if isinstance(copy, int):
                self._erase(copy)
                continue
            started = time.monotonic()
            try:
                good = self._read(copy) if promotion else self._write(copy)
                reason = "" if good else f"slot {copy.slot} does not hold what it should"
            except OSError as error:
                good, reason = False, str(error)
            if reason and (promotion or not self._failing):
                log.warning(
                    "event=tier_%s_failed reason=%r", "promotion" if promotion else "demotion", reason
                )
            if not promotion:
                self._failing = not good
            self._end(Finished(copy, promotion, good, time.monotonic() - started))

    def _erase(self, slot: int) -> None:
        try:
            self._file.erase(slot)
        except OSError as error:
            log.warning("event=tier_erase_failed slot=%d reason=%r", slot, str(error))

    def _next(self) -> tuple[Copy | int, bool] | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self._promotions or self._demotions)
            if self._closing:
                return None
            if self._promotions:
                return self._promotions.popleft(), True
            return self._demotions.popleft(), False

    def _write(self, copy: Copy) -> bool:
        size = len(self._buffer)
        if os.preadv(self._pool, [self._buffer], copy.block * size) != size:
            raise OSError(f"the pool's data ends before block {copy.block}")
        self._file.write(copy.slot, copy.content, self._buffer)
        return True

    def _read(self, copy: Copy) -> bool:
        if not self._file.read(copy.slot, copy.content, self._buffer):
            return False
        write_all(self._pool, self._buffer, copy.block * len(self._buffer))
        return True
