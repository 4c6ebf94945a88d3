"""Tokens that a frontend's socket has not taken yet."""

from msgspec.structs import replace

from kvmanager.protocol import TokenBatch, TokenEvent


class TokenOutbox:
    """Events for one frontend, in order; what a sequence adds is joined to what it already has waiting here.

    So a slow frontend costs memory by the token and not by the message, and catches up with one message.
    """

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._newest: dict[tuple[str, int, int], int] = {}  # choice → index of its last event
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, events: list[TokenEvent]) -> None:
        for event in events:
            key = (event.request_id, event.attempt, event.choice)
            index = self._newest.get(key)
            if index is not None and _follows(self._events[index], event):
                self._events[index] = _join(self._events[index], event)
            else:
                self._newest[key] = len(self._events)
                self._events.append(event)
            self.num_tokens += len(event.token_ids)

    def batch(self) -> TokenBatch:
        """Everything that waits, as one message; it stays until `clear`."""
        return TokenBatch(tuple(self._events))

    def clear(self) -> None:
        self._events.clear()
        self._newest.clear()
        self.num_tokens = 0


def _follows(first: TokenEvent, then: TokenEvent) -> bool:
    """False where another runner produced the tokens between."""
    return then.position == first.position + len(first.token_ids)


def _join(first: TokenEvent, then: TokenEvent) -> TokenEvent:
    """Two successive events of one choice as one."""
    logprobs = None if then.logprobs is None else (*(first.logprobs or ()), *then.logprobs)
    return replace(
        first,
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        finish_reason=then.finish_reason,
        stop_reason=then.stop_reason,
        beam=then.beam,
        search=then.search,
        error=then.error,
    )
