"""Block hashes: which content a block holds, equal in every process and at every start.

    block_hash = SHA-256(parent_hash ‖ fields)
    field      = tag (1 byte) ‖ length (4 bytes, little-endian) ‖ value
    fields     = "T" tokens (4 bytes each, little-endian), then "S" SHA-256 of the cache salt if there is one

The parent of a sequence's first block is the root: the layout's fingerprint. A field that is absent is left
out, so that new fields (an adapter, say) leave the hashes of those who do not use them as they are.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from kvmanager.protocol import Layout

HASH_BYTES = 32
TOKEN_BYTES = 4
TENANT_BYTES = 16
NO_SALT = b""

assert (sys.byteorder, array("I").itemsize) == ("little", TOKEN_BYTES), (
    "tokens are hashed as they lie in memory"
)


class Content(NamedTuple):
    """What a block holds."""

    block_hash: bytes
    parent_hash: bytes
    salt: bytes
    tokens: bytes  # packed


Held = tuple[bytes, bytes, bytes, bytes]
"""The same as a plain tuple, which is made in a quarter of the time: the pool makes several per step, and all
who speak of the block share it.
"""
NO_HASH = b""
NOTHING: Held = (NO_HASH, NO_HASH, NO_SALT, b"")
"""Of a block that is not sealed."""


def token_array(token_ids: Iterable[int]) -> "array[int]":
    """Raises OverflowError for an id outside 0 .. 2**32-1."""
    if isinstance(token_ids, array):
        return token_ids
    packed = array("I")
    packed.fromlist(list(token_ids))  # quicker than from an iterable
    return packed


def field(tag: bytes, value: bytes) -> bytes:
    """One tagged, length-prefixed field."""
    return tag + len(value).to_bytes(4, "little") + value


class _Before(dict[int, bytes]):
    """By a field's bytes of tokens: its tag and length."""

    def __missing__(self, length: int) -> bytes:
        self[length] = before = field(b"T", bytes(length))[:-length]
        return before


_BEFORE = _Before()


def salt_digest(cache_salt: str, tenant: str = "") -> bytes:
    """32 bytes that stand for a salt wherever it is kept; empty for no salt.

    Those of a tenant, 32 hex digits, begin with its 16 bytes: so nothing of it meets anything of others, and
    what is its own can be told.
    """
    if not tenant:
        return sha256(cache_salt.encode()).digest() if cache_salt else NO_SALT
    return tenant_bytes(tenant) + sha256(cache_salt.encode()).digest()[:TENANT_BYTES]


def tenant_bytes(tenant: str) -> bytes:
    """What the salts of a tenant begin with; nothing for none. It must be one: see `tenant_fault`."""
    return bytes.fromhex(tenant)


def tenant_fault(tenant: str) -> str:
    """Why this is no tenant, and an empty string if it is one or none."""
    if not tenant or (len(tenant) == 2 * TENANT_BYTES and set(tenant) <= set("0123456789abcdef")):
        return ""
    return f"a tenant is {2 * TENANT_BYTES} small hex digits, and not {tenant[:64]!r}"


def root_hash(layout: Layout) -> bytes:
    """The parent of every first block: two layouts never share a hash."""
    values = (
        layout.model,
        layout.dtype,
        layout.block_size,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
    )
    return sha256(b"".join(field(b"L", str(value).encode()) for value in values)).digest()


def block_hash(parent_hash: bytes, tokens: bytes, salt: bytes) -> bytes:
    """`tokens`: the block's token ids, packed; `salt`: from `salt_digest`."""
    return content(parent_hash, tokens, salt)[0]


def content(parent_hash: bytes, tokens: bytes, salt: bytes) -> Held:
    """What a block with these tokens holds; the hash is that of `block_hash`."""
    data = parent_hash + _BEFORE[len(tokens)] + tokens
    return sha256(data + field(b"S", salt) if salt else data).digest(), parent_hash, salt, tokens


def hash_chain(parent_hash: bytes, packed: bytes, width: int, salt: bytes) -> list[Held]:
    """What consecutive blocks of `width` bytes of tokens each hold; what is left of them at the end is not
    looked at. The same as `content` of one after the other, in less time.
    """
    before, after, contents = _BEFORE[width], field(b"S", salt) if salt else b"", []
    for end in range(width, len(packed) + 1, width):
        tokens = packed[end - width : end]
        digest = sha256(parent_hash + before + tokens + after).digest()
        contents.append((digest, parent_hash, salt, tokens))
        parent_hash = digest
    return contents
