"""Chunks with only text in them are nearly all chunks: their static parts are encoded once per choice."""

from typing import Any, Final

import msgspec

encode = msgspec.json.encode

# Stands for the text in a template; the control characters and the length make sure that it is no user's
# text.
PLACEHOLDER: Final = "\x01\x02text-of-the-chunk-goes-here\x02\x01"
_ENCODED: Final = encode(PLACEHOLDER)


class TextTemplate:
    """`chunk` is a whole chunk whose text is PLACEHOLDER; `fill` makes the event with another text."""

    def __init__(self, chunk: Any) -> None:
        before, after = encode(chunk).split(_ENCODED)
        self._before = b"data: " + before
        self._after = after + b"\n\n"

    def fill(self, text: str) -> bytes:
        return self._before + encode(text) + self._after
