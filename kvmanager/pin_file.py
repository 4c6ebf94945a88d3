"""`pinned/`: the files in the pool directory by which pins outlive the manager, one for each, so that none
costs more for those that are there already.

A file holds name, end and block hashes, but no tokens and no salts. Its time is Unix time, so that it means
the same after the machine has started again; the core's are the monotonic clock's.
"""

import logging
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from kvmanager.asking.pinning import MAX_NAME_CHARS
from kvmanager.pool.hashing import HASH_BYTES
from kvmanager.pool_directory import write_whole
from kvmanager.scheduling.pins import PinKey, SavedPin

FORMAT = 2

log = logging.getLogger("kvmanager")


class _Pin(msgspec.Struct, frozen=True):
    format: int
    pin: SavedPin


def folder(pool_directory: str) -> Path:
    """Where they lie."""
    return Path(pool_directory) / "pinned"


def path(pool_directory: str, key: PinKey) -> Path:
    """A name may hold any character, so its hash names the file."""
    return folder(pool_directory) / sha256("/".join(key).encode()).hexdigest()


def write(pool_directory: str, changes: Mapping[PinKey, SavedPin | None]) -> None:
    """What cannot be written is logged: the pin then does not outlive this process."""
    for key, pin in changes.items():
        try:
            if pin is None:
                path(pool_directory, key).unlink(missing_ok=True)
                continue
            folder(pool_directory).mkdir(mode=0o700, exist_ok=True)
            data = msgspec.msgpack.encode(_Pin(FORMAT, _shifted(pin, _offset())))
            write_whole(path(pool_directory, key), data)
        except OSError as error:
            log.warning("event=pin_not_saved reason=%r", str(error))


def read(pool_directory: str) -> list[SavedPin]:
    """Those that are saved, in the order in which they end. A damaged file is logged, and is no pin."""
    pins = []
    for file in folder(pool_directory).glob("?" * 64):
        try:
            pins.append(parse(file.read_bytes()))
        except (ValueError, OSError) as error:
            log.warning("event=pin_discarded reason=%r", str(error))
            file.unlink(missing_ok=True)
    return sorted(pins, key=lambda pin: pin.expires_at)


def parse(data: bytes) -> SavedPin:
    """Raises ValueError."""
    content = msgspec.msgpack.decode(data, type=_Pin)
    if (
        content.format != FORMAT
        or len(content.pin.name) > MAX_NAME_CHARS
        or len(content.pin.hashes) % HASH_BYTES
    ):
        raise ValueError(f"its format is {content.format} and not {FORMAT}, or its pin cannot be")
    return _shifted(content.pin, -_offset())


def _offset() -> float:
    """From the monotonic clock to Unix time, in seconds."""
    return time.time() - time.monotonic()


def _shifted(pin: SavedPin, seconds: float) -> SavedPin:
    return pin._replace(expires_at=pin.expires_at + seconds)
