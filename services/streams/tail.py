"""One reader of a resumable stream: its events with their numbers, from the one after those that it has."""

import asyncio
import time
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from kvmanager.errors import PagekeeperError
from services.api.client_link import ClientLink
from services.api.sse import KEEP_ALIVE, SSE_HEADERS, last_words
from services.config import FrontendConfig
from services.errors import INTERNAL, ApiError, from_pagekeeper
from services.streams.journal import Dropped, StreamState

STREAM_ID: Final = b"x-stream-id"
HANDED_OVER: Final = ApiError(
    503, "this frontend is stopping; go on with GET /v1/streams/{id} and Last-Event-ID", code="stopping"
)


class Source(Protocol):
    """Where a reader's events come from. `numbered_to`: the last one that can be resumed after; None: all."""

    @property
    def state(self) -> StreamState:
        """The journal so far."""

    @property
    def numbered_to(self) -> int | None:
        """See above."""

    @property
    def begun(self) -> bool:
        """Whether an answer may begin. Raises ApiError if there will be none."""

    def wake(self) -> None:
        """End a `wait` early, if that would take long."""

    async def wait(self, seconds: float) -> "Source":
        """Wait for something new, up to `seconds`. Where to look next: itself, or who runs the stream now.

        Raises ApiError if it goes on nowhere.
        """

    async def close(self) -> None:
        """The reader has gone."""


class Tail:
    """An ASGI application that sends what `source` has after event number `after`."""

    def __init__(self, config: FrontendConfig, source: Source, after: int) -> None:
        self._config = config
        self._source = source
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientLink(receive, send, self._config.client_timeout_seconds, lambda: self._source.wake())
        try:
            while not client.gone and not self._source.begun:
                self._source = await self._source.wait(self._config.keep_alive_seconds)
            if not client.gone:
                await client.start([*SSE_HEADERS, (STREAM_ID, self._source.state.spec.id.encode())])
                await self._follow(client)
        except asyncio.CancelledError:  # the server's drain time is over
            if not client.started:
                raise HANDED_OVER.again() from None
            await client.end(last_words(HANDED_OVER))
        except Exception as error:
            await client.end(last_words(_in_words(error)))
            if not client.started or _in_words(error) is INTERNAL:
                raise
        finally:
            client.close()
            await self._source.close()

    async def _follow(self, client: ClientLink) -> None:
        """Until the stream ends or the client goes. Raises ApiError or PagekeeperError if it goes on
        nowhere.
        """
        silence = self._config.keep_alive_seconds
        spoke = time.monotonic()
        while not client.gone:
            data = self._take()
            if self._source.state.ended:
                await client.send(data, more=False)
                return
            left = spoke + silence - time.monotonic()
            if not data and left <= 0:
                data = KEEP_ALIVE
            if data:
                await client.send(data)
                spoke = time.monotonic()
            else:
                self._source = await self._source.wait(left)

    def _take(self) -> bytes:
        """What is new, each event with its number; without one where it cannot be resumed after it."""
        try:
            events = self._source.state.ring.since(self._after)
        except Dropped as dropped:
            raise gone(self._after, dropped.first) from None
        numbered_to = self._source.numbered_to
        parts = []
        for number, event in enumerate(events, self._after + 1):
            if numbered_to is None or number <= numbered_to:
                parts.append(b"id: %d\n" % number)
            parts.append(event)
        self._after += len(events)
        return b"".join(parts)


def no_stream(stream_id: str) -> ApiError:
    """It has expired, was deleted, or never was."""
    message = f"there is no stream {stream_id[:80]!r} (any more) that this key may read"
    return ApiError(404, message, code="not_found")


def gone(after: int, first: int) -> ApiError:
    """The reader is behind what is kept."""
    message = f"the event after {after} is not kept any more (stream_bytes); the first that is: {first}"
    return ApiError(410, message, code="events_dropped")


def _in_words(error: Exception) -> ApiError:
    if isinstance(error, PagekeeperError):
        return from_pagekeeper(error)
    return error if isinstance(error, ApiError) else INTERNAL
