"""All resumable streams of one frontend: those that it runs, and those that it follows or takes over."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable
from typing import Final

from starlette.requests import Request

from kvmanager.errors import PagekeeperError
from services.api.call import Call, Identity
from services.api.openai_types import GenerationRequest
from services.api.sse import Answer, Renderer
from services.auth import caller
from services.context import Context
from services.errors import ApiError
from services.metrics import TAKEN_OVER
from services.request_log import LOGGED
from services.streams.journal import Journal, Journals, StreamSpec
from services.streams.run import StreamRun
from services.streams.source import LocalSource, RemoteSource
from services.streams.tail import Tail, no_stream

TICK: Final = 1.0  # seconds
STREAM_IDS: Final = re.compile(r"(cmpl|chatcmpl)-[0-9a-f]{32}")

Rebuilder = Callable[[StreamSpec], tuple[Call, Renderer]]

log = logging.getLogger("pagekeeper.streams")


def resumable(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.resumable)


def owner_of(request: Request) -> str:
    """What stands for the API key of a request: a stream belongs to the key that asked for it."""
    if not caller(request).keyed:
        return ""
    key = request.headers.get("authorization", "").partition(" ")[2].strip()
    return hashlib.sha256(key.encode("latin-1")).hexdigest()


class Streams:
    """`rebuilders` has for each route what makes a call of a journal's spec."""

    def __init__(self, context: Context, journals: Journals) -> None:
        self.rebuilders: dict[str, Rebuilder] = {}
        self._context = context
        self._journals = journals
        self._runs: dict[str, StreamRun] = {}
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick(), name="streams")
        self._ticker.add_done_callback(_say_why)

    async def stop(self) -> None:
        """End what runs here; other frontends may take it over."""
        if self._ticker is not None:
            self._ticker.cancel()
        runs = list(self._runs.values())
        for run in runs:
            run.stop()
        await asyncio.gather(*(run.stopped() for run in runs))
        await self._journals.close()

    async def answer(
        self, request: Request, call: Call, renderer: Renderer, identity: Identity, body: bytes
    ) -> Answer:
        """Run a new call, resumable. Raises PagekeeperError."""
        prompts = tuple(generation.request.prompt_token_ids for generation in call.generations)
        spec = StreamSpec(
            id=identity.id,
            route=call.route,
            owner=owner_of(request),
            tenant=identity.tenant,
            model=call.model,
            created=identity.created,
            body=body,
            prompts=prompts,
        )
        journal = await self._journals.create(spec)
        run = await self._start(call, renderer, journal, request.state.request_id, adopted=False)
        request.scope["state"][LOGGED] = True
        return Tail(self._context.config, LocalSource(self, run), 0)

    async def source(self, stream_id: str, owner: str) -> LocalSource | RemoteSource:
        """Where to read a stream from. Raises ApiError 404, or PagekeeperError."""
        if (run := self.running(stream_id)) is not None:
            if run.state.spec.owner != owner or not run.begun:
                raise no_stream(stream_id)
            return LocalSource(self, run)
        follower = await self._journals.follow(stream_id)
        if follower is None:
            raise no_stream(stream_id)
        source = RemoteSource(self, follower)
        if follower.state.spec.owner != owner:
            await source.close()
            raise no_stream(stream_id)
        return await source.successor()

    async def discard(self, stream_id: str, owner: str) -> None:
        """End a stream and remove what is kept of it. Raises ApiError 404, or PagekeeperError."""
        run = self.running(stream_id)
        if run is not None and run.state.spec.owner == owner and not run.over:
            run.discard()
            return
        follower = await self._journals.follow(stream_id)
        if follower is None:
            raise no_stream(stream_id)
        await follower.close()
        if follower.state.spec.owner != owner:
            raise no_stream(stream_id)
        await self._journals.discard(stream_id)

    def running(self, stream_id: str) -> StreamRun | None:
        """The stream as it runs here, if it does."""
        run = self._runs.get(stream_id)
        return None if run is None or run.lost else run

    async def adopt(self, stream_id: str) -> StreamRun | None:
        """Go on with a stream whose frontend has gone. Raises ApiError or PagekeeperError if this one
        cannot.
        """
        journal = await self._journals.take_over(stream_id)
        if journal is None:
            return None
        spec = journal.state.spec
        try:
            self._context.model.check_name(spec.model)
            call, renderer = self.rebuilders[spec.route](spec)
        except ApiError:
            await journal.close()
            raise
        self._context.metrics.count(TAKEN_OVER)
        log.info("taking over stream %s after event %d", stream_id, journal.state.ring.next - 1)
        return await self._start(call, renderer, journal, stream_id, adopted=True)

    async def _start(
        self, call: Call, renderer: Renderer, journal: Journal, request_id: str, *, adopted: bool
    ) -> StreamRun:
        try:
            run = StreamRun(self._context, call, renderer, journal, request_id, adopted=adopted)
            run.start(self._ended)
        except PagekeeperError:
            await (journal.close() if adopted else journal.remove())
            raise
        self._runs[call.id] = run
        return run

    def _ended(self, run: StreamRun) -> None:
        if self._runs.get(run.state.spec.id) is run:
            del self._runs[run.state.spec.id]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            ttl = self._context.config.stream_ttl_seconds
            await asyncio.gather(*(run.renew(ttl) for run in list(self._runs.values())))
            await self._journals.sweep()


def _say_why(task: "asyncio.Task[None]") -> None:
    """Without its ticker a frontend would lose its streams to others: that must not go unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
