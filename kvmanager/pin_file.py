"""`pins`: the file in the pool directory by which pins outlive the manager. Replaced whole at each change.

It holds names, ends and block hashes, but no tokens and no salts. Its times are Unix time, so that they mean
the same after the machine has started again; the core's are the monotonic clock's.
"""

import logging
import time
from pathlib import Path

import msgspec

from kvmanager.pool.hashing import HASH_BYTES
from kvmanager.pool_directory import write_whole
from kvmanager.scheduling.pins import MAX_NAME_CHARS, SavedPin

FORMAT = 1

log = logging.getLogger("kvmanager")


class _Pins(msgspec.Struct, frozen=True):
    format: int
    pins: list[SavedPin]


def path(pool_directory: str) -> Path:
    """Where it lies."""
    return Path(pool_directory) / "pins"


def write(pool_directory: str, pins: list[SavedPin]) -> None:
    """What cannot be written is logged: the pins then do not outlive this process."""
    data = msgspec.json.encode(_Pins(FORMAT, [_shifted(pin, _offset()) for pin in pins]))
    try:
        write_whole(path(pool_directory), data)
    except OSError as error:
        log.warning("event=pins_not_saved reason=%r", str(error))


def read(pool_directory: str) -> list[SavedPin]:
    """Empty if none are saved, or if the file is damaged, which is logged."""
    try:
        return parse(path(pool_directory).read_bytes())
    except FileNotFoundError:
        return []
    except (ValueError, OSError) as error:
        log.warning("event=pins_discarded reason=%r", str(error))
        return []


def parse(data: bytes) -> list[SavedPin]:
    """Raises ValueError."""
    content = msgspec.json.decode(data, type=_Pins)
    good = all(
        len(pin.name) <= MAX_NAME_CHARS and all(len(digest) == HASH_BYTES for digest in pin.hashes)
        for pin in content.pins
    )
    if content.format != FORMAT or not good:
        raise ValueError(f"its format is {content.format} and not {FORMAT}, or a pin in it cannot be")
    return [_shifted(pin, -_offset()) for pin in content.pins]


def _offset() -> float:
    """From the monotonic clock to Unix time, in seconds."""
    return time.time() - time.monotonic()


def _shifted(pin: SavedPin, seconds: float) -> SavedPin:
    return pin._replace(expires_at=pin.expires_at + seconds)
