"""`blocks.meta`: one fixed-size, checksummed record per block, in a memory-mapped file.

A write is one copy into the page cache, so it survives the process's death; a torn one fails its checksum.

    checksum  CRC-32 of the rest   4 bytes      salt         32 bytes (zeros: none)
    state                          1 byte       sealed_at     8 bytes, float64 seconds
    number of tokens               2 bytes      tokens        4 bytes each, block_size of them
    generation                     8 bytes
    owner tag                      8 bytes
    block hash, parent hash       32 bytes each (zeros: none)
"""

import mmap
import os
import struct
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from kvmanager.pool.block_pool import FREE, NO_OWNER, RESERVED, SEALED, BlockRecord
from kvmanager.pool.hashing import HASH_BYTES, NO_HASH, NO_SALT, TOKEN_BYTES

_CHECKSUM = struct.Struct("<I")
_FIXED = struct.Struct("<BxHQ8s32s32s32sd")
_body = lru_cache(lambda block_size: struct.Struct(f"{_FIXED.format}{block_size * TOKEN_BYTES}s"))
_whole = lru_cache(lambda block_size: struct.Struct(f"<I{_body(block_size).format.removeprefix('<')}"))
_ZEROS = bytes(HASH_BYTES)
assert (FREE, RESERVED, SEALED) == (0, 1, 2), "those that a record may have come first"


def record_bytes(block_size: int) -> int:
    """Size of one record."""
    return _CHECKSUM.size + _FIXED.size + block_size * TOKEN_BYTES


def pack(record: BlockRecord, block_size: int) -> bytes:
    body = _body(block_size).pack(
        record.state,
        len(record.tokens) // TOKEN_BYTES,
        record.generation,
        record.owner_tag,
        record.block_hash,
        record.parent_hash,
        record.salt,
        record.sealed_at,
        record.tokens,
    )
    return crc32(body).to_bytes(_CHECKSUM.size, "little") + body


def unpack(data: bytes, block_size: int) -> BlockRecord | None:
    """None if the record is damaged."""
    return unpack_all(data, block_size)[0]


def unpack_all(data: "bytes | mmap.mmap", block_size: int) -> list[BlockRecord | None]:
    """Records that lie one after the other; None where one is damaged."""
    found: list[BlockRecord | None] = []
    add, size, width = found.append, record_bytes(block_size), block_size * TOKEN_BYTES
    with memoryview(data) as view:
        end = 0
        for checksum, state, length, generation, owner, digest, parent, salt, sealed_at, tokens in _whole(
            block_size
        ).iter_unpack(view):
            start, end = end + _CHECKSUM.size, end + size
            length *= TOKEN_BYTES
            if checksum != crc32(view[start:end]) or state > SEALED or length > width:
                add(None)
                continue
            add(
                BlockRecord(
                    state,
                    generation,
                    owner,
                    NO_HASH if digest == _ZEROS else digest,
                    NO_HASH if parent == _ZEROS else parent,
                    NO_SALT if salt == _ZEROS else salt,
                    tokens if length == width else tokens[:length],
                    sealed_at,
                )
            )
    return found


def write_empty(path: Path, num_blocks: int, block_size: int) -> None:
    """Create the file with every block free."""
    free = BlockRecord(FREE, 0, NO_OWNER, NO_HASH, NO_HASH, NO_SALT, b"", 0.0)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for start in range(0, num_blocks, 4096):
            file.write(pack(free, block_size) * min(4096, num_blocks - start))


class RecordFile:
    """The records of an existing file of the right size."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._block_size = block_size
        self._record_bytes = record_bytes(block_size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, block: int, record: BlockRecord) -> None:
        start = block * self._record_bytes
        self._map[start : start + self._record_bytes] = pack(record, self._block_size)

    def read_all(self) -> list[BlockRecord | None]:
        """Every block's record in order; None where it is damaged."""
        return unpack_all(self._map, self._block_size)

    def close(self) -> None:
        self._map.close()
