"""The frontend's sockets: the manager's session, the runners' tokens, and the clock, around the pure
tracker.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from kvmanager.client import AsyncManagerClient, check_socket
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    MAX_FRAME_BYTES,
    MAX_PART,
    Answer,
    Cancel,
    Claimed,
    Evict,
    ExplainQuery,
    Pin,
    PlanQuery,
    Query,
    Stats,
    StatsQuery,
    Submit,
    TextPart,
    decode_token_batch,
)
from services.api.generation import Generation
from services.metrics import (
    GENERATION_TOKENS,
    ITL,
    PROMPT_TOKENS,
    RESUBMITTED,
    STALE_EVENTS,
    TTFT,
    UNREADABLE,
    Metrics,
)
from services.tracker import Effects, Request, Tracker
from services.unreadable import Unreadable

_TICK: Final = 0.25  # seconds
_STATS_EVERY: Final = 4  # ticks: the manager's answers show that it lives
_MAX_OUTBOX: Final = 16384  # messages
_HELLO_TIMEOUT: Final = 5.0  # seconds
_HIGH_WATER_MARK: Final = 1000  # token batches
_COUNTED: Final = (RESUBMITTED, STALE_EVENTS, UNREADABLE)

ToManager = Submit | Claimed | Cancel | Query

log = logging.getLogger("pagekeeper.frontend")


class Backend:
    """Runs generations. `on_fatal` is called with an error that no waiting can mend (the Hello was
    refused).
    """

    def __init__(
        self,
        client: AsyncManagerClient,
        token_endpoint: str,
        tracker: Tracker,
        metrics: Metrics,
        on_fatal: Callable[[PagekeeperError], None],
    ) -> None:
        self.tracker = tracker
        self._client = client
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._generations: dict[Request, Generation] = {}
        self._outbox: deque[ToManager] = deque()
        self._outbox_filled = asyncio.Event()
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._next_query = 0
        self._unreadable = Unreadable("token batches")
        self._counted = (0, 0, 0)  # of _COUNTED, what the metrics have
        self._endpoint = token_endpoint
        self._context = zmq.asyncio.Context()
        self._tokens = self._context.socket(zmq.PULL)
        self._tokens.setsockopt(zmq.LINGER, 0)
        self._tokens.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._tokens.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._tokens.bind(token_endpoint)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the loops; the manager may come later."""
        loops = (self._manager_loop, self._send_loop, self._token_loop, self._tick_loop)
        self._tasks = [asyncio.create_task(loop(), name=loop.__name__) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(self._loop_ended)

    async def stop(self) -> None:
        """Cancel what is live, end the loops, unlink the socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tokens.close()
        self._context.term()
        self._client.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._endpoint.removeprefix("ipc://"))

    # --- for the HTTP side --------------------------------------------------------------------------------

    def submit(self, generation: Generation) -> None:
        """Start a generation; its signal wakes the reader. Raises PagekeeperError when too many wait."""
        if len(self._outbox) >= _MAX_OUTBOX:
            raise PagekeeperError("manager_absent", "the KV manager does not take messages", 1.0)
        effects = self.tracker.submit(time.monotonic(), generation.request)
        self._generations[generation.request] = generation
        self._apply(effects)

    def cancel(self, generation: Generation) -> None:
        """The reader is gone, or has all that it wanted. Harmless after the end."""
        self._generations.pop(generation.request, None)
        self._apply(self.tracker.cancel(generation.request))

    async def stats(self, timeout: float) -> Stats | None:
        """Ask the manager; None if it does not answer within `timeout` seconds."""
        stats: Stats | None = await self.ask(StatsQuery, timeout)
        return stats

    async def ask(self, message: Callable[[int], Query], timeout: float) -> Any:
        """Put any question to the manager, made with its number. Its Answer, of the kind that belongs to the
        question, or None if none comes within `timeout` seconds.
        """
        if not self.tracker.connected or len(self._outbox) >= _MAX_OUTBOX:
            return None
        self._next_query += 1
        query_id = self._next_query
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        for each in in_parts(message(query_id)):
            self._send(each)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return None
        finally:
            del self._queries[query_id]

    # --- loops --------------------------------------------------------------------------------------------

    async def _manager_loop(self) -> None:
        while True:
            try:
                await self._client.connect(_HELLO_TIMEOUT)
            except PagekeeperError as error:
                if error.code != "manager_absent":
                    self._give_up(error)
                    return
                await asyncio.sleep(_TICK)
                continue
            self._outbox.clear()  # all of it belongs to an earlier session
            self._apply(self.tracker.connect(time.monotonic()))
            log.info("connected to the KV manager")
            await self._receive_until_fenced()
            self.tracker.disconnect()
            log.info("the session with the KV manager has ended; saying Hello again")

    async def _receive_until_fenced(self) -> None:
        while self._client.session is not None:
            try:
                messages = await self._client.receive()
            except PagekeeperError:  # no room for a probe: the manager does not read
                await asyncio.sleep(_TICK)
                continue
            now = time.monotonic()
            for message in messages:
                if isinstance(message, Answer):
                    self._answer(message)
                self._apply(self.tracker.heard(now, message))

    def _answer(self, answer: Answer) -> None:
        query = self._queries.get(answer.query_id)
        if query is not None and not query.done():
            query.set_result(answer)

    async def _send_loop(self) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox and self._client.session is not None:
                message = self._outbox.popleft()
                try:
                    await self._client.send(message)
                except PagekeeperError:  # no room: the manager does not read
                    self._outbox.appendleft(message)
                    await asyncio.sleep(_TICK)

    async def _token_loop(self) -> None:
        while True:
            frames = await self._tokens.recv_multipart()
            try:
                (frame,) = frames
                batch = decode_token_batch(frame)
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                self._unreadable.add(time.monotonic(), str(error))
                continue
            self._apply(self.tracker.tokens(time.monotonic(), batch))

    async def _tick_loop(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(_TICK)
            ticks += 1
            try:
                check_socket(self._endpoint)
            except PagekeeperError as error:
                self._give_up(error)
                return
            self._client.show_life()
            self._apply(self.tracker.tick(time.monotonic()))
            if ticks % _STATS_EVERY == 0 and self.tracker.connected:
                self._send(StatsQuery(0))  # nobody waits for it; that it is answered is the point
            counts = (self.tracker.resubmitted, self.tracker.stale_events, self._unreadable.count)
            for spec, count, counted in zip(_COUNTED, counts, self._counted, strict=True):
                self._metrics.count(spec, count - counted)
            self._counted = counts

    def _loop_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._give_up(PagekeeperError("internal", f"{task.get_name()} failed: {error!r}"))

    def _give_up(self, error: PagekeeperError) -> None:
        """Tell whoever waits here, then whoever can end the process."""
        self._apply(self.tracker.give_up(error))
        self._on_fatal(error)

    # --- effects ------------------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> None:
        for message in effects.send:
            self._send(message)
        now = time.monotonic()
        for request in effects.changed:
            generation = self._generations.get(request)
            if generation is not None:
                self._advance(now, generation)

    def _send(self, message: ToManager) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    def _advance(self, now: float, generation: Generation) -> None:
        """Turn new tokens into text, end choices at their stop strings, wake the reader."""
        request = generation.request
        for choice in generation.choices:
            new = len(choice.output.token_ids) - choice.seen
            if new > 0:
                self._measure(now, generation, choice.last_token_at, new)
                choice.last_token_at = now
            if new > 0 or not choice.closed:
                stop = choice.advance()
                if stop is not None:
                    self._apply(self.tracker.stop(request, choice.output.index, stop))
        if generation.done:
            self._generations.pop(request, None)
        generation.signal.wake()

    def _measure(self, now: float, generation: Generation, last: float, new: int) -> None:
        generation.last_token_at = now
        if generation.first_token_at is None:
            generation.first_token_at = now
            self._metrics.observe(TTFT, now - generation.request.arrival)
            self._metrics.count(PROMPT_TOKENS, len(generation.request.prompt_token_ids))
        elif last:
            self._metrics.observe(ITL, (now - last) / new, new)
        self._metrics.count(GENERATION_TOKENS, new)


def in_parts(query: Query, longest: int = MAX_PART) -> Iterator[Query]:
    """A question or command about a text of more than `longest` tokens as the messages that bring it."""
    if not isinstance(query, ExplainQuery | PlanQuery | Pin | Evict) or len(query.token_ids) <= longest:
        yield query
        return
    tokens = query.token_ids
    for start in range(0, len(tokens) - 1, longest):
        part = tokens[start : min(start + longest, len(tokens) - 1)]
        yield TextPart(query.query_id, part, query.cache_salt, query.tenant, start)
    yield msgspec.structs.replace(query, token_ids=tokens[-1:], start=len(tokens) - 1)
