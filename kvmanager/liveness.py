"""Proof of life by the kernel: a process holds a lock on its file in `locks/` for as long as it lives.

`fcntl.lockf` locks belong to a process (no forked child keeps them) and end with it, in any container of the
host. A lock is only ever *asked* about (F_GETLK), never tried, so that looking cannot get in the way of a
process that takes its own; only to remove the file of one that has died it is taken, for a moment, which is
why whoever finds it taken tries again for a while. A process must not open its own lock file a second time:
closing it would drop the lock.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from kvmanager.errors import PagekeeperError

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid
_ATTEMPTS = 16
_PAUSE = 0.02  # seconds between two attempts at a lock that is taken


class HeldLock:
    """A lock file held by this process. Raises PagekeeperError ("internal") if another process holds it, and
    goes on to for a third of a second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _acquire(path)

    def touch(self) -> None:
        """Show that this process gets on: the file's time of modification becomes now."""
        os.utime(self._fd)

    @property
    def stands(self) -> bool:
        """Whether the file still has its name; else it was removed, and another process may use the name."""
        return is_at(self._fd, self.path)

    def check(self) -> None:
        """Raises PagekeeperError ("internal") unless the name is still ours."""
        if not self.stands:
            raise PagekeeperError(
                "internal",
                f"the lock file {self.path} was removed: another process may have taken this one's place, "
                "so it ends; start it again if none has",
            )

    def release(self) -> None:
        """Remove the file, if it is still ours, and drop the lock. Safe to call twice."""
        if self._fd >= 0:
            if self.stands:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _acquire(path: Path) -> int:
    """Open, lock, and check that the path still names what was locked (its owner may have removed it)."""
    why = f"was removed {_ATTEMPTS} times while it was being locked"
    for _ in range(_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(fd, path):
                return fd
        except OSError:
            why = "is locked by another process; stop it or use another name"
            time.sleep(_PAUSE)
        os.close(fd)
    raise PagekeeperError("internal", f"{path} {why}")


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return False


class WatchedLock:
    """Another process's lock file, opened once. Raises FileNotFoundError if there is none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.inode = os.fstat(self._fd).st_ino

    def held(self) -> bool:
        """Whether some other process holds the lock now."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, question))[0]
        return kind != fcntl.F_UNLCK

    @property
    def is_empty(self) -> bool:
        """As every lock file is."""
        return not os.fstat(self._fd).st_size

    def discard(self, path: Path) -> None:
        """Remove the file at `path`, if it is this one and nobody holds it: its process has died."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until `close`: nobody takes it meanwhile
        except OSError:
            return
        if is_at(self._fd, path):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)


def held_locks(locks: Path, *, but: str, tidy: bool = False) -> tuple[str, ...]:
    """Names of the files in `locks` that another process holds; `but` (our own) is not opened. `tidy`: remove
    those that nobody holds, and that are empty as lock files are.
    """
    names = []
    for path in sorted(locks.iterdir()):
        if path.name == but:
            continue
        try:
            lock = WatchedLock(path)
        except (FileNotFoundError, IsADirectoryError):
            continue
        if lock.held():
            names.append(path.name)
        elif tidy and lock.is_empty:
            lock.discard(path)
        lock.close()
    return tuple(names)


class WatchedLocks:
    """Those of all processes that use a pool directory, by name."""

    def __init__(self, folder: Path, *, but: str) -> None:
        """All in `folder` that another process holds; the others are removed. `but` is our own."""
        self._folder = folder
        self._locks = {name: WatchedLock(folder / name) for name in held_locks(folder, but=but, tidy=True)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._locks)

    def all_held(self) -> bool:
        """Whether everybody lives."""
        return all(lock.held() for lock in self._locks.values())

    def put(self, name: str, lock: WatchedLock) -> str | None:
        """Watch one more, or another of that name. If the former one's holder lives, but its file was removed
        and another process took the name, it may still write its blocks, which wait for its death: it is
        watched under another name, which is returned.
        """
        old, former = self._locks.get(name), None
        if old is not None and old.inode != lock.inode and old.held():
            former = f"{name}/{old.inode}"  # no lock file has such a name
            self._locks[former] = old
        elif old is not None:
            old.close()
        self._locks[name] = lock
        return former

    def take_dead(self) -> list[str]:
        """Names of those whose process has died; they are watched no more, and their files removed."""
        dead = [name for name, lock in self._locks.items() if not lock.held()]
        for name in dead:
            lock = self._locks.pop(name)
            lock.discard(self._folder / name)
            lock.close()
        return dead
