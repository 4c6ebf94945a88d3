"""Noise for sockets: no messages, messages cut short, and messages with parts of other kinds."""

from collections.abc import Iterator
from random import Random
from typing import Any, Final

import msgspec

ODD: Final[tuple[Any, ...]] = (
    *(None, True, "", "x" * 5000, "\x00", b"\xff", 0, -1, 1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -1.0, 1e308, float("inf"), float("nan"), [], [[]], {}, {1: 2.0}, [[0, 0]], [1, [2]]),
)


def deep(levels: int) -> bytes:
    """An array in an array in an array…"""
    return b"\x91" * levels + b"\xc0"


def confuse(data: Any, random: Random) -> Any:
    """The same message with one part, however deep, that is something else."""
    if not isinstance(data, list) or not data or random.random() < 0.1:
        return random.choice(ODD)
    place = random.randrange(len(data))
    return [*data[:place], confuse(data[place], random), *data[place + 1 :]]


def confused(messages: list[Any], random: Random, count: int) -> Iterator[bytes]:
    """Encoded messages of which each has a part of another kind, or of an odd value."""
    plain = [msgspec.msgpack.decode(msgspec.msgpack.encode(message)) for message in messages]
    for _ in range(count):
        yield msgspec.msgpack.encode(confuse(random.choice(plain), random))


def torn(messages: list[Any], random: Random, count: int) -> Iterator[bytes]:
    """Encoded messages that are cut short, or of which some bytes have flipped."""
    whole = [msgspec.msgpack.encode(message) for message in messages]
    for _ in range(count):
        data = bytearray(random.choice(whole))
        for _ in range(random.randint(0, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        yield bytes(data[: random.randint(0, len(data))])
