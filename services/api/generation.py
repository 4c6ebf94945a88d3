"""From tokens to text: what a live request has produced, as the HTTP side reads it.

Tokens are turned into text when they arrive, not when the client reads: a stop string ends the request at
once, and a slow client finds one longer piece. What waits for it is bounded by the request's `max_tokens`.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from services.text.detokenizer import Detokenizer
from services.text.stop_strings import StopStrings
from services.tracker import Output, Request

_FOREVER: Final = 3600.0


class Signal:
    """Wakes the one task that waits; a wake without a waiter is kept for the next wait."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float = _FOREVER) -> bool:
        """Whether it was woken within `timeout` seconds."""
        if not self._set:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(timeout, _finish, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        woken, self._set = self._set, False
        return woken


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class ChoiceStream:
    """The text of one choice. `ends` are the tokens that end it; their own text is shown only with
    `show_end`.
    """

    def __init__(
        self,
        output: Output,
        detokenizer: Detokenizer,
        stops: StopStrings,
        ends: Collection[int],
        *,
        show_end: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.output = output
        self.seen = 0  # tokens turned into text
        self.taken = 0  # tokens handed to the reader, with their text
        self.length = 0  # characters of text, all in all
        self.closed = False  # all text is there
        self.last_token_at = 0.0
        self._detokenizer = detokenizer
        self._stops = stops
        self._ends = ends
        self._show_end = show_end
        self._min_tokens = min_tokens
        self._pending: list[str] = []

    def advance(self) -> str | None:
        """Turn new tokens into text. Returns the stop string if one was found: the choice ends there."""
        output = self.output
        total = len(output.token_ids)
        while self.seen < total:
            token = output.token_ids[self.seen]
            self.seen += 1
            if self.seen == total and self._hidden(token):
                break
            stop = self._push(self._detokenizer.push((token,)))
            if stop is not None:
                self._cut()
                return stop
        if output.finish_reason is not None and not self.closed:
            return self._close()
        return None

    @property
    def readable(self) -> bool:
        """Whether the reader would find text."""
        return bool(self._pending)

    def take(self) -> str:
        """The text that came since the last call; `taken` goes up to the tokens that it covers."""
        text = "".join(self._pending)
        self._pending.clear()
        self.taken = self.seen
        return text

    def offset(self, token: int) -> int:
        """Characters of text before the token at index `token`."""
        offsets = self._detokenizer.text_offsets
        return offsets[token] if token < len(offsets) else self.length

    def _hidden(self, token: int) -> bool:
        output = self.output
        if output.finish_reason != "stop" or token not in self._ends:
            return False
        return not (self._show_end and output.stop_reason is not None)

    def _push(self, text: str) -> str | None:
        if not text:
            return None
        piece = self._stops.push(text, armed=self.seen >= self._min_tokens)
        self._show(piece.text)
        return piece.stop

    def _show(self, text: str) -> None:
        if text:
            self._pending.append(text)
            self.length += len(text)

    def _close(self) -> str | None:
        """The choice has ended by itself: show what was held back (a stop string may still end in it), but
        not the half of a character that `max_tokens` cut.
        """
        rest = self._detokenizer.finish()
        stop = self._push("" if self.output.finish_reason == "length" else rest)
        if stop is None:
            self._show(self._stops.finish())
        self.closed = True
        return stop

    def _cut(self) -> None:
        """Tokens after the stop string never were."""
        del self.output.token_ids[self.seen :]
        del self.output.logprobs[self.seen :]
        self.closed = True


class Generation:
    """One prompt's run: its request at the tracker, and its choices' text. `signal` wakes the reader."""

    def __init__(self, request: Request, choices: list[ChoiceStream], signal: Signal) -> None:
        self.request = request
        self.choices = choices
        self.signal = signal
        self.first_token_at: float | None = None
        self.last_token_at = request.arrival

    @property
    def done(self) -> bool:
        """All text is there, or an error is."""
        return self.request.error is not None or all(choice.closed for choice in self.choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.output.token_ids) for choice in self.choices)

    @property
    def mean_gap(self) -> float | None:
        """Seconds from token to token after the first; None with fewer than two."""
        steps = max(len(choice.output.token_ids) for choice in self.choices) - 1
        if self.first_token_at is None or steps < 1:
            return None
        return (self.last_token_at - self.first_token_at) / steps
