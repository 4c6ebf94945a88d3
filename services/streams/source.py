"""Where a reader of a resumable stream gets its events: from the stream that runs here, or from its
journal.
"""

import time
from typing import Final, Protocol

from services.errors import ApiError
from services.streams.journal import Follower, JournalError, JournalLost, StreamState
from services.streams.run import StreamRun
from services.streams.tail import HANDED_OVER, Source, no_stream

LOOK: Final = 0.25  # seconds, the longest wait for a journal that others write
ATTEND: Final = 1.0  # seconds between two signs that somebody reads


class Hub(Protocol):
    """Who knows all streams of this frontend."""

    def running(self, stream_id: str) -> StreamRun | None:
        """The stream as it runs here, if it does."""

    async def adopt(self, stream_id: str) -> StreamRun | None:
        """Go on with it if its frontend has gone. Raises ApiError or PagekeeperError."""

    async def source(self, stream_id: str, owner: str) -> "Source":
        """Where to read it. Raises ApiError or PagekeeperError."""


class LocalSource:
    """A stream that runs here."""

    def __init__(self, hub: Hub, run: StreamRun) -> None:
        self._hub = hub
        self._run = run
        self._signal = run.attach()

    @property
    def state(self) -> StreamState:
        return self._run.state

    @property
    def numbered_to(self) -> int | None:
        return self._run.numbered_to

    @property
    def begun(self) -> bool:
        if self._run.failure is not None:
            raise self._run.failure
        return self._run.begun

    def wake(self) -> None:
        self._signal.wake()

    async def wait(self, seconds: float) -> Source:
        run = self._run
        if not run.over:
            await self._signal.wait(seconds)
        if run.over and not run.state.ended and run.failure is None:
            if not run.lost:
                raise HANDED_OVER.again()
            await self.close()
            return await self._hub.source(run.state.spec.id, run.state.spec.owner)
        return self

    async def close(self) -> None:
        self._run.detach(self._signal)


class RemoteSource:
    """A stream that runs on another frontend, or has ended."""

    numbered_to = None
    begun = True

    def __init__(self, hub: Hub, follower: Follower) -> None:
        self._hub = hub
        self._follower = follower
        self._attended = 0.0

    @property
    def state(self) -> StreamState:
        return self._follower.state

    def wake(self) -> None:
        return  # no wait takes long

    async def wait(self, seconds: float) -> Source:
        before = self.state.ring.next
        try:
            await self._follower.refresh(min(seconds, LOOK))
            if time.monotonic() - self._attended > ATTEND:
                self._attended = time.monotonic()
                await self._follower.attend()
        except JournalLost:
            raise no_stream(self.state.spec.id) from None
        except JournalError as error:
            raise ApiError(
                503, f"the stream cannot be followed: {error}", code="journal_unavailable"
            ) from None
        return self if self.state.ring.next > before else await self.successor()

    async def successor(self) -> "LocalSource | RemoteSource":
        """Who has the stream, if its owner has gone: this frontend."""
        if self.state.ended:
            return self
        stream_id = self.state.spec.id
        run = self._hub.running(stream_id) or await self._hub.adopt(stream_id)
        if run is None:
            return self
        await self.close()
        return LocalSource(self._hub, run)

    async def close(self) -> None:
        await self._follower.close()
