"""Journals as files in the pool directory: `streams/<id>`, and `streams/<id>.lock` while somebody owns it.

A file is only appended to, so other frontends read it while it grows. Once it holds twice what is kept it is
written anew beside itself and renamed. The owner holds the lock, touches the file every second, and learns
from the lock file's time whether readers elsewhere were there.

Whoever takes a journal over goes on in a new file in the old one's place. So an owner that stood still for
so long that its lock was taken away writes to a file that nobody reads, and sees that after each write,
before it sends anything. Owner and heir replace or remove a file only with the kernel's lock on the file
itself (`_keeps_its_place`): an owner that is stopped before it has that lock finds its file replaced, and
while one is stopped with it, nobody can take the journal over.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from pathlib import Path
from typing import Final

import msgspec

from services.streams.file_frames import decode_batch, frame, frames, load
from services.streams.journal import (
    Batch,
    Journal,
    JournalError,
    JournalLost,
    StreamSpec,
    StreamState,
    full,
    unavailable,
)
from services.supervisor.lock_files import FileLock, is_at

POLL: Final = 0.02  # seconds between two looks at a file that others write
STILL: Final = 10.0  # seconds without a sign of the owner after which its lock is taken away
STUCK: Final = 30.0  # seconds without one after which nobody waits for it any more
SWEPT: Final = 256  # files looked at by one sweep

log = logging.getLogger("pagekeeper.streams")

_NAME: Final = re.compile(r"[a-z]+-[0-9a-f]+")


class FileJournal:
    """One that this process owns."""

    def __init__(
        self, path: Path, lock: FileLock, fd: int, state: StreamState, size: int, ttl: float
    ) -> None:
        self.state = state
        self._path = path
        self._lock = lock
        self._fd = fd
        self._size = self._compacted = size
        self._ttl = ttl

    async def append(self, batch: Batch) -> None:
        self._write(frame(batch))
        self._check_place()
        self.state.apply(batch)
        if self._size - self._compacted > 2 * self.state.ring.max_bytes:
            self._compact()

    async def renew(self) -> bool:
        self._check_place()
        if not self._lock.stands:
            raise JournalLost("the lock of the journal was removed: another may own it")
        os.utime(self._fd)
        return time.time() - self._lock.touched < self._ttl

    async def close(self) -> None:
        _close(self._fd)
        self._fd = -1
        self._lock.release()

    async def remove(self) -> None:
        """If another owns it, or this one has been closed, it stays."""
        if self._fd >= 0 and _keeps_its_place(self._fd, self._path):
            self._path.unlink(missing_ok=True)
        await self.close()

    def _write(self, data: bytes) -> None:
        """All of it or, as far as readers can tell, nothing."""
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as error:
            raise JournalError(f"{self._path} cannot be written: {error}") from None
        self._size += len(data)

    def _check_place(self) -> None:
        """Raises JournalLost if what is written does not reach readers."""
        try:
            if os.stat(self._path).st_ino != os.fstat(self._fd).st_ino:
                raise JournalLost("the journal was replaced: another owns it")
        except FileNotFoundError:
            raise JournalLost("the journal was removed") from None

    def _compact(self) -> None:
        """If that fails, the file grows on."""
        try:
            if _keeps_its_place(self._fd, self._path):
                os.close(self._rewrite())
                return
        except OSError:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._compacted = self._size

    def _rewrite(self) -> int:
        """Write what is kept to a new file, and put it in the old one's place, which is returned, still open.
        Raises OSError; nothing has changed then.
        """
        fresh = self._path.with_suffix(".new")
        data = frame(self.state.spec) + frame(self.state.snapshot())
        fresh.unlink(missing_ok=True)  # perhaps of an owner that stands still: not to be shared with it
        fd = -1
        try:
            fd = _new_file(fresh, data)
            os.replace(fresh, self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            _close(fd)
            raise
        old, self._fd = self._fd, fd
        self._size = self._compacted = len(data)
        return old

    def take_away(self) -> None:
        """From an owner that may still write. What it writes until the file is replaced counts, as it may
        send that. Raises OSError, or JournalError.
        """
        size = self._size
        old = self._rewrite()
        try:
            for _, content in frames(os.pread(old, os.fstat(old).st_size - size, size)):
                batch = decode_batch(content)
                self._write(frame(batch))
                self.state.apply(batch)
        finally:
            os.close(old)


def _close(fd: int) -> None:
    """-1: there is nothing to close."""
    if fd >= 0:
        os.close(fd)


def _new_file(path: Path, data: bytes) -> int:
    """A new file with `data` in it, open for appending. Raises OSError; nothing is left open then."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) < len(data):
            raise OSError("no space for all of it")
    except OSError:
        os.close(fd)
        raise
    return fd


class FileFollower:
    """One that is only read."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError, or JournalError."""
        self._path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._open()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.state, self._size = load(os.pread(fd, os.fstat(fd).st_size, 0), self._max_bytes)
        except (OSError, JournalError):
            os.close(fd)
            raise
        self._leave()
        self._fd = fd

    async def refresh(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (new := self._read()) and not self.state.ended and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
        if not new and not self.state.ended:
            self._check()

    def _read(self) -> bool:
        """Whether there was something new."""
        try:
            data = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - self._size), self._size)
            if os.stat(self._path).st_ino != os.fstat(self._fd).st_ino:  # then what was read does not count
                self._open()
                return True
            ends = [self._apply(end, content) for end, content in frames(data)]
        except FileNotFoundError:
            raise JournalLost("the journal was removed") from None
        except (OSError, msgspec.DecodeError) as error:
            raise JournalError(f"the journal cannot be read: {error}") from None
        self._size += ends[-1] if ends else 0
        return bool(ends)

    def _apply(self, end: int, content: bytes) -> int:
        self.state.apply(decode_batch(content))
        return end

    def _check(self) -> None:
        """An owner that is alive but does nothing keeps its lock: waiting for it must end."""
        silent = time.time() - os.fstat(self._fd).st_mtime
        if silent > STUCK:
            raise JournalError(f"the frontend that runs the stream has done nothing for {silent:.0f} s")

    async def attend(self) -> None:
        try:
            os.utime(_lock_of(self._path))
        except FileNotFoundError:  # nobody owns it now
            return

    async def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        _close(self._fd)
        self._fd = -1


def _keeps_its_place(fd: int, path: Path) -> bool:
    """Whether the open file has that name, and nobody else replaces or removes it before it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return is_at(fd, path)


def _claim(path: Path) -> tuple[int, FileLock] | None:
    """A journal and its lock, unless its owner lives and gets on. Of two that come at once, one gets it."""
    fd, lock = -1, None
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        if _keeps_its_place(fd, path):
            lock = FileLock.take(_lock_of(path))
            if lock is None and time.time() - os.fstat(fd).st_mtime > STILL:
                _lock_of(path).unlink(missing_ok=True)
                lock = FileLock.take(_lock_of(path))
    if lock is None:
        _close(fd)
    return None if lock is None else (fd, lock)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


class FileJournals:
    """Those of one pool directory. At most `limit`, each with `max_bytes` of events, kept for `ttl`
    seconds.
    """

    def __init__(self, pool_directory: str, limit: int, max_bytes: int, ttl: float) -> None:
        self._folder = Path(pool_directory) / "streams"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._limit = limit
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._unseen: list[Path] = []  # what the sweep has still to look at

    async def create(self, spec: StreamSpec) -> Journal:
        path = self._folder / spec.id
        lock = None
        try:
            self._make_room()
            lock = FileLock.take(_lock_of(path))
            assert lock is not None, f"{spec.id} is created twice"
            fd = _new_file(path, data := frame(spec))
        except OSError as error:
            path.unlink(missing_ok=True)
            if lock is not None:
                lock.release()
            raise unavailable(error) from None
        return FileJournal(path, lock, fd, StreamState(spec, self._max_bytes), len(data), self._ttl)

    def _make_room(self) -> None:
        """At the limit the oldest of those that nobody owns goes. Raises PagekeeperError if there is none."""
        names = os.listdir(self._folder)
        journals = {name for name in names if _NAME.fullmatch(name)}
        if len(journals) < self._limit:
            return
        owned = {name.removesuffix(".lock") for name in names if name.endswith(".lock")}
        idle = sorted((self._folder / name for name in journals - owned), key=_age)
        if not idle:
            raise full(self._limit)
        idle[0].unlink(missing_ok=True)

    async def follow(self, stream_id: str) -> FileFollower | None:
        path = self._folder / stream_id
        try:
            if not self._expired(path):
                return FileFollower(path, self._max_bytes)
        except FileNotFoundError:
            return None
        except (OSError, JournalError) as error:
            raise unavailable(error) from None
        return None

    def _expired(self, path: Path) -> bool:
        return time.time() - os.stat(path).st_mtime > self._ttl

    async def take_over(self, stream_id: str) -> Journal | None:
        path = self._folder / stream_id
        if (found := _claim(path)) is None:
            return None
        fd, lock, journal = *found, None
        try:
            state, size = load(os.pread(fd, os.fstat(fd).st_size, 0), self._max_bytes)
            journal = FileJournal(path, lock, fd, state, size, self._ttl)
            if not state.ended:
                journal.take_away()
            if not state.ended:
                return journal
        except (OSError, JournalError, msgspec.DecodeError) as error:
            log.info("stream %s cannot be taken over: %s", stream_id, error)
        if journal is not None:
            await journal.close()
        else:
            _close(fd)
            lock.release()
        return None

    async def discard(self, stream_id: str) -> None:
        try:
            (self._folder / stream_id).unlink(missing_ok=True)
        except OSError as error:
            raise unavailable(error) from None

    async def sweep(self) -> None:
        try:
            self._unseen = self._unseen or [
                path for path in sorted(self._folder.iterdir()) if _NAME.fullmatch(path.stem)
            ]
            batch, self._unseen = self._unseen[:SWEPT], self._unseen[SWEPT:]
            for path in batch:
                self._sweep(path)
        except OSError as error:
            log.warning("expired streams were not removed: %s", error)

    def _sweep(self, path: Path) -> None:
        try:
            if path.is_dir() or not self._expired(path):  # a folder is nothing of ours
                return
        except FileNotFoundError:
            return
        if (lock := FileLock.take(_lock_of(path))) is not None:
            if path.suffix != ".lock" and self._expired(path):
                path.unlink(missing_ok=True)
            lock.release()

    async def close(self) -> None:
        await self.sweep()


def _age(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0
