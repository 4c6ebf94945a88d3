"""Token ids to text as they come: what is shown is never taken back, and all of it is the whole text.

Only a character whose bytes are incomplete is held back, so an emoji split over tokens never appears in part.
Bytes that are no UTF-8 come out as U+FFFD: when the next byte shows it, or at `finish`.
"""

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence

from services.text.tokenizer import Tokenizer

_utf8_decoder = getincrementaldecoder("utf-8")
_CHARACTER_BYTES = 4  # at most, in UTF-8


class Detokenizer:
    """The text of one choice. With `prompt_token_ids` the text continues the prompt's, to the byte.

    `text_offsets` has, for each token pushed, the characters of complete text before it; a token that goes on
    with an unfinished character has the offset of that character.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: Collection[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")
        self._length = 0
        self._strip = tokenizer.strips_leading_space
        self.text_offsets: list[int] = []
        self._continue(prompt_token_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that they complete."""
        texts = [self._push(id) for id in ids]
        return "".join(texts)

    def finish(self) -> str:
        """The rest, if the tokens ended inside a character. Nothing may be pushed after it."""
        return self._complete(b"", final=True)

    def _push(self, id: int) -> str:
        self.text_offsets.append(self._length)
        return "" if id in self._skipped else self._complete(self._tokenizer.token_bytes(id))

    def _complete(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        self._length += len(text)
        return text

    def _continue(self, prompt: Sequence[int]) -> None:
        """Start as if the prompt had been pushed: its last bytes may begin the first character."""
        tail = b""
        for id in reversed(prompt):
            if id not in self._skipped:
                tail = self._tokenizer.token_bytes(id) + tail
            if len(tail) >= _CHARACTER_BYTES:
                break
        self._decoder.decode(tail)
        self._strip = self._strip and not tail
