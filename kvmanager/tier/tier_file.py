"""The file of the disk tier: a slotted file of blocks that survives restarts, and is never trusted.

    file    = header (one page) ‖ num_slots slot headers ‖ num_slots payloads, each from a page's start on
    header  = magic, CRC-32, version, slots, bytes of a block, tokens of a block, the layout's root hash
    slot header (numbers little-endian)
        checksum  CRC-32 of the rest     4 bytes      salt                      32 bytes (zeros: none)
        number of tokens                 2 bytes      payload checksum          32 bytes
        serial: order of writing         8 bytes      tokens                    4 bytes each
        block hash, parent hash         32 bytes each
    payload checksum = SHA-256(root hash ‖ block hash ‖ payload)

A payload is written before its header. So content that is torn, flipped, cut off, of another block or of
another layout fails a checksum when it is read, and is a miss. The file grows as slots are used; holes read
as zeros, which are no header.
"""

import fcntl
import os
import stat
import struct
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from kvmanager.errors import PagekeeperError
from kvmanager.pool.hashing import HASH_BYTES, NO_SALT, TOKEN_BYTES, Content, content, root_hash
from kvmanager.protocol import Layout

MAGIC = b"PKTIER\r\n"
VERSION = 1
PAGE = 4096

_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<IQQI32s")  # version, slots, bytes of a block, tokens of a block, root hash
_SLOT = struct.Struct("<HQ32s32s32s32s")
_ZEROS = bytes(HASH_BYTES)


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class TierFile:
    """The open, locked file. Reads and writes wait for the disk: for a thread that may.

    `kept`: what its slots hold by their headers, written longest ago first. `note`: why an earlier file's
    content was dropped, or an empty string.
    """

    def __init__(self, path: str, disk_bytes: int, layout: Layout) -> None:
        """Raises PagekeeperError ("internal") if this cannot be a tier: it is never overwritten then."""
        self.block_bytes = layout.block_bytes
        self._block_size = layout.block_size
        self._root = root_hash(layout)
        self._slot_header_bytes = _CHECKSUM.size + _SLOT.size + layout.block_size * TOKEN_BYTES
        self._stride = whole_pages(layout.block_bytes)
        self.num_slots = max(0, disk_bytes - 2 * PAGE) // (self._slot_header_bytes + self._stride)
        if self.num_slots < 1:
            raise PagekeeperError(
                "internal",
                f"disk_bytes={disk_bytes} has no room for a block of this model ({layout.block_bytes} "
                "bytes) and two pages of headers; give more",
            )
        self._payloads = whole_pages(PAGE + self.num_slots * self._slot_header_bytes)
        try:
            self._fd = open_own(path)
        except OSError as error:
            raise PagekeeperError(
                "internal", f"disk_tier={path} cannot be opened: {error.strerror}; choose another file"
            ) from error
        try:
            self.note = self._adopt(path)
            self.kept, self._serial = self._scan()
        except OSError as error:
            os.close(self._fd)
            raise PagekeeperError(
                "internal", f"disk_tier={path} cannot be used: {error.strerror}; choose another file"
            ) from error
        except PagekeeperError:
            os.close(self._fd)
            raise

    def _adopt(self, path: str) -> str:
        """Take over what is there if it is ours and fits, else begin anew."""
        body = _HEADER.pack(VERSION, self.num_slots, self.block_bytes, self._block_size, self._root)
        wanted = MAGIC + _CHECKSUM.pack(crc32(body)) + body
        found = os.pread(self._fd, len(wanted), 0)
        if found == wanted:
            return ""
        if found and not found.startswith(MAGIC):
            raise PagekeeperError(
                "internal", f"disk_tier={path} is a file of something else; remove it or choose another"
            )
        os.ftruncate(self._fd, 0)
        write_all(self._fd, wanted, 0)
        return "it was of another layout, version or size, or damaged" if found else ""

    def _scan(self) -> tuple[list[tuple[int, Content]], int]:
        """All slots with a good header, in the order of writing; of equal contents the newest. And the
        highest serial number.
        """
        table = os.pread(self._fd, self.num_slots * self._slot_header_bytes, PAGE)
        found: dict[bytes, tuple[int, int, Content]] = {}
        for slot in range(len(table) // self._slot_header_bytes):
            start = slot * self._slot_header_bytes
            header = self._unpack(table[start : start + self._slot_header_bytes])
            if header is not None:
                serial, content, _ = header
                found[content.block_hash] = max(
                    (serial, slot, content), found.get(content.block_hash, (-1, slot, content))
                )
        order = sorted(found.values())
        return [(slot, content) for _, slot, content in order], order[-1][0] if order else 0

    def write(self, slot: int, content: Content, payload: "bytes | bytearray") -> None:
        """Keep a block in `slot`, in place of what is there. Raises OSError; the slot is then a miss."""
        self._serial += 1
        body = _SLOT.pack(
            len(content.tokens) // TOKEN_BYTES,
            self._serial,
            content.block_hash,
            content.parent_hash,
            content.salt,
            self._payload_checksum(content, payload),
        )
        body += content.tokens.ljust(self._block_size * TOKEN_BYTES, b"\0")
        write_all(self._fd, payload, self._payloads + slot * self._stride)
        write_all(self._fd, _CHECKSUM.pack(crc32(body)) + body, PAGE + slot * self._slot_header_bytes)

    def read(self, slot: int, content: Content, payload: bytearray) -> bool:
        """Fill `payload` with the block in `slot`; False unless it is, as a whole, the block with this
        content. Raises OSError.
        """
        header = self._unpack(
            os.pread(self._fd, self._slot_header_bytes, PAGE + slot * self._slot_header_bytes)
        )
        if header is None or header[1] != content:
            return False
        if os.preadv(self._fd, [payload], self._payloads + slot * self._stride) != self.block_bytes:
            return False
        return header[2] == self._payload_checksum(content, payload)

    def erase(self, slot: int) -> None:
        """What the slot holds is not found again, not by a later start either. Raises OSError."""
        write_all(self._fd, bytes(self._slot_header_bytes), PAGE + slot * self._slot_header_bytes)

    def close(self) -> None:
        """Drops the lock; the file stays."""
        os.close(self._fd)

    def _payload_checksum(self, content: Content, payload: "bytes | bytearray") -> bytes:
        digest = sha256(self._root + content.block_hash)
        digest.update(payload)
        return digest.digest()

    def _unpack(self, data: bytes) -> tuple[int, Content, bytes] | None:
        """(serial, content, payload checksum), or None where there is no good header."""
        body = data[_CHECKSUM.size :]
        if len(data) != self._slot_header_bytes or _CHECKSUM.unpack_from(data)[0] != crc32(body):
            return None
        length, serial, digest, parent, salt, checksum = _SLOT.unpack_from(body)
        if not 0 < length <= self._block_size:
            return None
        tokens = body[_SLOT.size : _SLOT.size + length * TOKEN_BYTES]
        held = Content(*content(parent, tokens, NO_SALT if salt == _ZEROS else salt))
        return (serial, held, checksum) if held.block_hash == digest else None


def open_own(path: str) -> int:
    """The file, made if absent, ours alone (mode 0600) and locked. Raises PagekeeperError or OSError."""
    target = Path(path)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(fd)
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a file"
    elif status.st_uid != os.geteuid():
        reason = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    else:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            reason = "is in use by another KV manager"
    if reason:
        os.close(fd)
        raise PagekeeperError("internal", f"disk_tier={path} {reason}; choose another file")
    os.fchmod(fd, 0o600)
    return fd


def write_all(fd: int, data: "bytes | bytearray", offset: int) -> None:
    """Raises OSError; a short write goes on until the system says why."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
