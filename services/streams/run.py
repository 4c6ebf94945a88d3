"""A resumable stream while this frontend runs it: from the backend into the journal, whoever listens.

Events are numbered and in the journal before any reader gets them. If the journal fails, the stream goes on
for the readers that it has, without numbers: from there on it cannot be resumed. It ends when the call
does, or when nobody has listened for the time to live.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import TokenLogprobs
from services.api.call import Call
from services.api.generation import ChoiceStream, Signal
from services.api.sse import DONE, CallEvents, Renderer, event
from services.context import Context
from services.errors import INTERNAL, ApiError, from_pagekeeper
from services.request_log import log_call
from services.streams.journal import Batch, Journal, JournalError, JournalLost, Progress, StreamState

log = logging.getLogger("pagekeeper.streams")


class StreamRun:
    """`begun`: an answer may begin, as there is something to say or the keep-alive time is over. `failure`:
    why it ended before that, or by a fault of ours. `lost`: another frontend runs it now, or the journal
    was removed. `over`: nothing more comes from here.
    """

    def __init__(
        self,
        context: Context,
        call: Call,
        renderer: Renderer,
        journal: Journal,
        request_id: str,
        *,
        adopted: bool,
    ) -> None:
        self.state: StreamState = journal.state
        self.begun = adopted  # somebody may know its id, even if nothing was said yet
        self.failure: ApiError | None = None
        self.lost = False
        self.over = False
        self.numbered_to: int | None = None  # the last event that is in the journal, once that has failed
        self._context = context
        self._call = call
        self._renderer = renderer
        self._journal = journal
        self._request_id = request_id
        self._readers: set[Signal] = set()
        self._left_at = time.monotonic()
        self._abandoned = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        if self.state.choices:
            restore(call, renderer, self.state)
        self._events = CallEvents(call, renderer)
        self._recorded = {
            (number, choice.output.index): choice.taken
            for number, generation in enumerate(call.generations)
            for choice in generation.choices
        }  # tokens of each choice that the journal has

    def start(self, on_end: Callable[["StreamRun"], None]) -> None:
        """Submit what is not done, and run. Raises PagekeeperError; nothing runs then."""
        try:
            for generation in self._call.generations:
                if not generation.done:
                    self._context.backend.submit(generation)
        except PagekeeperError:
            self._cancel()
            raise
        self._task = asyncio.create_task(self._run(), name=f"stream {self._call.id}")
        self._task.add_done_callback(lambda task: on_end(self))

    # --- readers ------------------------------------------------------------------------------------------

    def attach(self) -> Signal:
        """A new reader; its signal wakes it."""
        signal = Signal()
        self._readers.add(signal)
        return signal

    def detach(self, signal: Signal) -> None:
        """A reader has gone. One that has not begun, or that cannot be resumed, ends with its last reader."""
        self._readers.discard(signal)
        self._left_at = time.monotonic()
        if not self._readers and (not self.begun or self.numbered_to is not None):
            self.abandon()

    async def renew(self, ttl: float) -> None:
        """Call it every second: the journal learns that this process lives, and what nobody listens to
        ends.
        """
        if self.over or self.numbered_to is not None:
            return
        try:
            attended = await self._journal.renew()
        except JournalLost:
            self.lost = True
            self.stop()
        except JournalError as error:
            await self._fail(error)
        else:
            if not self._readers and not attended and time.monotonic() - self._left_at > ttl:
                self.abandon()

    def abandon(self) -> None:
        """Nobody will ask for it any more."""
        self._abandoned = True
        self.stop()

    def discard(self) -> None:
        """It was asked to go, with its journal."""
        self.lost = True
        self.abandon()

    def stop(self) -> None:
        """End here; what is in the journal stays, for another frontend."""
        self._stopping = True
        self._call.signal.wake()

    async def stopped(self) -> None:
        """Wait for the end after `stop`."""
        if self._task is not None:
            await self._task

    # --- inside -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._generate()
        except JournalLost:
            self.lost = True
        except Exception as error:
            log.error("stream %s failed", self._call.id, exc_info=error)
            self.failure = INTERNAL
        self.over = True
        self._cancel()
        self._wake()
        if self.state.ended or self._abandoned or self.failure is not None:  # else it ends elsewhere
            self._record()
        if self.failure is not None or self._abandoned:
            await self._journal.remove()
        elif self.numbered_to is None:
            await self._journal.close()

    def _record(self) -> None:
        error = self.failure or self._error()
        ended = 200 if self.state.ended else 499
        log_call(
            self._context,
            self._call,
            request_id=self._request_id,
            status=ended if error is None else error.status,
            error=error,
            now=time.monotonic(),
        )

    async def _generate(self) -> None:
        if not self.begun:
            await self._call.signal.wait(self._context.config.keep_alive_seconds)
            if (error := self._error()) is not None:
                self.failure = error
                return
        first = split(self._renderer.first()) if self.state.ring.next == 1 else []
        while not self._stopping and not self.state.ended:
            found = self._events.collect()
            events = [*first, *(data for _, _, data in found)]
            error, done = self._error(), self._call.done
            if error is not None:
                events.append(event(error.body()))
            elif done:
                events += self._events.usage()
            ended = done or error is not None
            if ended:
                events.append(DONE)
            if events:
                await self._write(Batch(self.state.ring.next, tuple(events), self._progress(found), ended))
            first, self.begun = [], True
            self._wake()
            if not ended:
                await self._call.signal.wait()

    def _progress(self, found: list[tuple[int, ChoiceStream, bytes]]) -> tuple[Progress, ...]:
        """What the events in `found` show."""
        items = []
        for number, choice in dict.fromkeys((number, choice) for number, choice, _ in found):
            output, key = choice.output, (number, choice.output.index)
            tokens = tuple(output.token_ids[self._recorded[key] : choice.taken])
            self._recorded[key] = choice.taken
            cached = self._call.generations[number].request.num_cached_tokens
            reasons = (output.finish_reason, output.stop_reason) if choice.closed else (None, None)
            items.append(Progress(number, output.index, tokens, cached, *reasons))
        return tuple(items)

    async def _write(self, batch: Batch) -> None:
        if self.numbered_to is None:
            try:
                await self._journal.append(batch)
                return
            except JournalLost:
                raise
            except JournalError as error:
                await self._fail(error)
        self.state.apply(batch)

    async def _fail(self, error: JournalError) -> None:
        log.warning("stream %s goes on, but cannot be resumed any more: %s", self._call.id, error)
        self.numbered_to = self.state.ring.next - 1
        await self._journal.remove()
        if not self._readers:
            self.abandon()

    def _error(self) -> ApiError | None:
        error = self._call.error
        return None if error is None else from_pagekeeper(error)

    def _cancel(self) -> None:
        for generation in self._call.generations:
            self._context.backend.cancel(generation)

    def _wake(self) -> None:
        for signal in self._readers:
            signal.wake()


def split(events: bytes) -> list[bytes]:
    """Whole events, one by one."""
    return [part + b"\n\n" for part in events.split(b"\n\n")[:-1]]


def restore(call: Call, renderer: Renderer, state: StreamState) -> None:
    """Bring a call that is new to where the journal's events end: the text of all that was shown is taken,
    and what was held back (half a character, the beginning of a stop string) is held back again.
    """
    for (number, index), kept in state.choices.items():
        generation = call.generations[number]
        choice = generation.choices[index]
        output = choice.output
        output.token_ids.extend(kept.token_ids)
        if generation.request.sampling.logprobs is not None:
            output.logprobs.extend([TokenLogprobs(0.0, 1, ())] * len(kept.token_ids))  # shown already
        generation.request.num_cached_tokens = kept.num_cached_tokens
        generation.request.attempt = 0  # the next is another one: it had its place in the queue before
        generation.first_token_at = time.monotonic()
        if kept.finish_reason is None:
            choice.advance()
            renderer.text(number, choice)
        else:
            output.finish_reason, output.stop_reason = kept.finish_reason, kept.stop_reason
            choice.seen = choice.taken = len(output.token_ids)
            choice.closed = True
