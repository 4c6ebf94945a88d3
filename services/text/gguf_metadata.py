"""The metadata of a GGUF file, read in one pass without touching its tensors.

The `gguf` package builds an array object per value, which takes seconds for a vocabulary; the frontend needs
the vocabulary at every start. Format, versions 2 and 3:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_KEYS = 1 << 16
_MAX_ITEMS = 1 << 24
_MAX_DEPTH = 4


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message names the file and what is wrong."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Key → value; strings are `str`, arrays are lists. Raises GGUFError, or OSError."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).metadata()
        except (ValueError, struct.error, KeyError) as error:
            raise GGUFError(f"{path} is not a readable GGUF file: {error}") from None


class _Reader:
    """A cursor over the mapped file; everything is little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def metadata(self) -> dict[str, Any]:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, not with b'GGUF'")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version}; supported are 2 and 3, little-endian")
        self.scalar("Q")  # number of tensors
        count = self.scalar("Q")
        if count > _MAX_KEYS:
            raise ValueError(f"{count} metadata keys; at most {_MAX_KEYS} are read")
        return {self.string(): self.value(self.scalar("I"), 0) for _ in range(count)}

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ValueError(f"it ends inside a value (wanted {size} bytes at {self.at} of {len(self.data)})")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.items(depth)
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def items(self, depth: int) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ITEMS or depth > _MAX_DEPTH:
            raise ValueError(
                f"an array of {count} items at depth {depth}; at most {_MAX_ITEMS} items are read"
            )
        if kind == _STRING:
            return self.strings(count)
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are some hundred thousand strings."""
        data, at, end = self.data, self.at, len(self.data)
        unpack, texts = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            (size,) = unpack(data, at)
            at += 8 + size
            if at > end:
                raise ValueError(f"it ends inside a string of {size} bytes at {at - size}")
            texts.append(data[at - size : at].decode("utf-8", "replace"))
        self.at = at
        return texts
