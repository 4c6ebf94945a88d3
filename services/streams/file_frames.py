"""What a journal's file holds: frames, each a length and a CRC-32 before its MessagePack.

The first one is the spec, the others are batches. One that is not whole is not there yet, or never will be.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import msgspec

from services.streams.journal import Batch, JournalError, StreamSpec, StreamState

_HEAD: Final = struct.Struct("<II")  # bytes, CRC-32

_encode = msgspec.msgpack.Encoder().encode
_decode_spec = msgspec.msgpack.Decoder(StreamSpec).decode
decode_batch = msgspec.msgpack.Decoder(Batch).decode


def frame(value: StreamSpec | Batch) -> bytes:
    data = _encode(value)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(end, content) of every whole frame, up to the first that is not."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        content = data[at + _HEAD.size : at + _HEAD.size + length]
        if not content or len(content) < length or zlib.crc32(content) != checksum:
            return
        at += _HEAD.size + length
        yield at, content


def load(data: bytes, max_bytes: int) -> tuple[StreamState, int]:
    """The state, and how many bytes of `data` it stands for. Raises JournalError without a readable spec."""
    state, size = None, 0
    try:
        for end, content in frames(data):
            if state is None:
                state = StreamState(_decode_spec(content), max_bytes)
            else:
                state.apply(decode_batch(content))
            size = end
    except msgspec.DecodeError as error:
        raise JournalError(f"the journal cannot be read: {error}") from None
    if state is None:
        raise JournalError("the journal has no readable beginning")
    return state, size
