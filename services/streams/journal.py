"""The journal of a resumable stream: what any frontend needs to show it again, or to go on with it.

A journal is a spec (what was asked) and batches in order. A batch holds events, numbered from 1, and the
tokens that they show; so folding the batches (`StreamState`) gives the events that are kept, and the tokens
from which another frontend continues. A batch is in the journal before any of it is sent. One frontend at a
time owns a journal and appends to it; others follow it, and may take it over once its owner is gone.

This module is pure; `file_journal` keeps journals on this host, `redis_journal` in Redis.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from kvmanager.errors import PagekeeperError

EVENT_OVERHEAD: Final = 64  # bytes that a kept event is counted for beside its text


class StreamSpec(msgspec.Struct, frozen=True):
    """What was asked. `body` is the checked request as JSON, its seed filled in, its prompt left out."""

    id: str  # also the `id` of every chunk
    route: str
    owner: str  # SHA-256 of the API key, in hex; empty where no keys are set
    tenant: str  # see services.auth
    model: str
    created: float  # Unix time
    body: bytes
    prompts: tuple[tuple[int, ...], ...]


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice whose text is in a batch's events; with a `finish_reason` the choice has ended."""

    prompt: int
    choice: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Events that belong together; `first` is the number of the first one. After an `ended` one nothing
    comes.
    """

    first: int
    events: tuple[bytes, ...]
    progress: tuple[Progress, ...] = ()
    ended: bool = False

    @property
    def last(self) -> int:
        """The number of the last event; `first` - 1 without any."""
        return self.first + len(self.events) - 1


class JournalError(Exception):
    """The journal cannot be written or read any more (no space, no Redis): the stream itself may go on."""


class JournalLost(JournalError):
    """The journal is gone, or another frontend has taken it over."""


class Dropped(Exception):
    """The event asked for is no longer kept; the first one that is has the number `first`."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


class Ring:
    """The last events, at most `max_bytes` of them, but always the very last one."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.first = 1  # number of the oldest event kept
        self._events: deque[bytes] = deque()
        self._bytes = 0

    @property
    def next(self) -> int:
        """The number that the next event gets."""
        return self.first + len(self._events)

    def start_at(self, number: int) -> None:
        """Events before `number` were dropped before this ring was made."""
        assert not self._events, "a ring with events has a beginning"
        self.first = number

    def append(self, event: bytes) -> None:
        self._events.append(event)
        self._bytes += len(event) + EVENT_OVERHEAD
        while self._bytes > self.max_bytes and len(self._events) > 1:
            self._bytes -= len(self._events.popleft()) + EVENT_OVERHEAD
            self.first += 1

    def since(self, after: int) -> list[bytes]:
        """The events after number `after`, in order. Raises Dropped if the first of them is not kept."""
        if after + 1 < self.first:
            raise Dropped(self.first)
        if after + 1 >= self.next:
            return []
        return [self._events[index] for index in range(after + 1 - self.first, len(self._events))]


@dataclass(slots=True)
class ChoiceState:
    """One choice as far as its text is in the journal."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StreamState:
    """A journal read so far: `apply` takes its batches in order."""

    def __init__(self, spec: StreamSpec, max_bytes: int) -> None:
        self.spec = spec
        self.ring = Ring(max_bytes)
        self.choices: dict[tuple[int, int], ChoiceState] = {}  # (prompt, choice)
        self.ended = False

    def apply(self, batch: Batch) -> None:
        """Take the next batch. The first one may begin anywhere: earlier events were dropped. Raises
        JournalError if it does not follow: two have written.
        """
        if self.ring.next == 1:
            self.ring.start_at(batch.first)
        if batch.first != self.ring.next:
            raise JournalError(f"batch {batch.first} does not follow event {self.ring.next - 1}")
        for event in batch.events:
            self.ring.append(event)
        self.advance(batch.progress)
        self.ended = self.ended or batch.ended

    def advance(self, progress: tuple[Progress, ...]) -> None:
        for item in progress:
            choice = self.choices.setdefault((item.prompt, item.choice), ChoiceState())
            choice.token_ids.extend(item.token_ids)
            choice.num_cached_tokens = item.num_cached_tokens
            choice.finish_reason, choice.stop_reason = item.finish_reason, item.stop_reason

    def snapshot(self) -> Batch:
        """One batch that stands for all so far: what is kept of the events, and all tokens."""
        progress = tuple(
            Progress(
                prompt,
                choice,
                tuple(state.token_ids),
                state.num_cached_tokens,
                state.finish_reason,
                state.stop_reason,
            )
            for (prompt, choice), state in self.choices.items()
        )
        ring = self.ring
        return Batch(ring.first, tuple(ring.since(ring.first - 1)), progress, self.ended)


class Journal(Protocol):
    """A journal that this process owns."""

    state: StreamState

    async def append(self, batch: Batch) -> None:
        """Write, then apply to `state`. Raises JournalLost, or JournalError after which nothing was
        written.
        """

    async def renew(self) -> bool:
        """Show that the owner lives; call it every second. Whether a reader was there within the time to
        live, on another frontend. Raises JournalError.
        """

    async def close(self) -> None:
        """Give up the ownership: what has not ended may be taken over."""

    async def remove(self) -> None:
        """Give up the ownership, and the journal with it. Never raises."""


class Follower(Protocol):
    """A journal that another process owns, or none."""

    state: StreamState

    async def refresh(self, seconds: float) -> None:
        """Read what is new into `state`; wait for it up to `seconds`. Raises JournalError."""

    async def attend(self) -> None:
        """Tell the owner that somebody reads; call it every second."""

    async def close(self) -> None:
        """Let go of it."""


class Journals(Protocol):
    """All journals that this frontend can reach."""

    async def create(self, spec: StreamSpec) -> Journal:
        """A new one. Raises PagekeeperError: "queue_full" at the limit, or "journal_unavailable"."""

    async def follow(self, stream_id: str) -> Follower | None:
        """None if there is none of that id. Raises PagekeeperError ("journal_unavailable")."""

    async def take_over(self, stream_id: str) -> Journal | None:
        """Become the owner of one that has not ended and whose owner is gone, else None. Never raises for a
        journal that cannot be reached.
        """

    async def discard(self, stream_id: str) -> None:
        """Remove it, whoever owns it: its owner learns of it when it renews. Raises PagekeeperError."""

    async def sweep(self) -> None:
        """A bounded piece of removing what has outlived its time; call it every second. Never raises."""

    async def close(self) -> None:
        """The end of this process."""


def unavailable(what: object) -> PagekeeperError:
    """The store of the journals does not do its part."""
    message = f"resumable streams cannot be kept now: {what}; ask without `stream_options.resumable`"
    return PagekeeperError("journal_unavailable", message, 1.0)


def full(limit: int) -> PagekeeperError:
    """The store is at its limit."""
    message = f"{limit} resumable streams are kept (setting max_streams), none of them over; try again later"
    return PagekeeperError("queue_full", message, 1.0)
