"""Looking at the lock files of a pool directory, without getting in the way of those who take them."""

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid


def held(lock: Path) -> bool:
    """Whether another process holds the lock file. It is only asked about, never taken."""
    try:
        with lock.open("r+b") as file:
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, question))[0]
    except FileNotFoundError:
        return False
    return kind != fcntl.F_UNLCK
