"""Lock files: looking at those of a pool directory without getting in the way of those who take them, and
taking our own.
"""

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid


def held(lock: Path) -> bool:
    """Whether another process holds the lock file. It is only asked about, never taken. A folder is none."""
    try:
        with lock.open("r+b") as file:
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, question))[0]
    except (FileNotFoundError, IsADirectoryError):
        return False
    return kind != fcntl.F_UNLCK


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


class FileLock:
    """A lock file that this process holds until it is released, or dies.

    The lock belongs to the open file (`flock`), not to the process as those in `locks/` do: two owners in one
    process see each other, and closing another handle of the file does not drop it.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> "FileLock | None":
        """None if somebody else holds it. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = cls(path, fd)
            if lock.stands:
                return lock
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # its owner removed the file meanwhile
        return None

    @property
    def stands(self) -> bool:
        """Whether the file still has its name; else it was removed, and another may have taken it."""
        return is_at(self._fd, self._path)

    @property
    def touched(self) -> float:
        """When the file was last touched, in Unix time."""
        return os.fstat(self._fd).st_mtime

    def release(self) -> None:
        """Remove the file, if it is still ours, and drop the lock. Safe to call twice."""
        if self._fd >= 0:
            if self.stands:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
