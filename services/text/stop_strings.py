"""Find stop strings in text that comes in pieces, without showing any part of one.

The text ends where the first stop string is complete; of several that end there, the longest is it. This
depends on the text alone, not on how it was cut into pieces. Each stop string has a Knuth–Morris–Pratt
automaton: its state is how many of the string's characters the text ends with, which is what is held back.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Text to show now, and the stop string if the text ends with it."""

    text: str
    stop: str | None = None


class StopStrings:
    """The matcher of one choice. With `include` the stop string is part of the text; nothing is held back."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty; want at least one character")
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str, armed: bool = True) -> Piece:
        """Take the next text. Unless `armed` (too few tokens yet) stop strings ending in it are text."""
        assert not self._stopped, "text after the stop string"
        if not self._matchers:
            return Piece(text)
        known = len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            found = [matcher.stop for matcher in self._matchers if matcher.push(text[end])]
            if found and armed:
                return self._end(text, end + 1, found[0])
        held = 0 if self._include else max(matcher.state for matcher in self._matchers)
        shown = len(text) - held
        self._held = text[shown:]
        return Piece(text[:shown])

    def finish(self) -> str:
        """The text has ended: what was held back only began like a stop string, and comes out in full."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, end: int, stop: str) -> Piece:
        self._stopped, self._held = True, ""
        return Piece(text[:end] if self._include else text[: end - len(stop)], stop)


class _Matcher:
    """`state`: the length of the longest proper beginning of `stop` that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = [0, 0]  # at i: the state after a mismatch in state i
        for char in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], char))

    def push(self, char: str) -> bool:
        """Whether `stop` is complete with this character."""
        state = self._next(self.state, char)
        complete = state == len(self.stop)
        self.state = self._fallback[state] if complete else state
        return complete

    def _next(self, state: int, char: str) -> int:
        while state and self.stop[state] != char:
            state = self._fallback[state]
        return state + 1 if self.stop[state] == char else 0
