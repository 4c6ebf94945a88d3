"""What the whole cache holds, put together from the manager's pages, exact at one event's number.

The pages of one collection are of different moments. The events since the first page bring what they say up
to the last one's: for each content its last event decides, and content without an event was there all the
time. One collection serves all who ask while it runs and shortly after.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    MAX_PAGE,
    At,
    BlocksPage,
    BlocksQuery,
    CacheEvent,
    EventsPage,
    EventsQuery,
    own_numbers,
)
from services.backend import Backend
from services.errors import from_pagekeeper
from services.kv.ask import RETRY_AFTER, ask
from services.kv.contents import Contents
from services.kv.tree import Tree

FRESH: Final = 2.0  # seconds that a collection is used again
MAX_ATTEMPTS: Final = 4
MAX_KEPT: Final = 64  # collections, each for a moment


@dataclass(slots=True)
class Collection:
    """All that one owner may see: `contents` at the moment `at`."""

    at: At
    contents: Contents
    made: float  # monotonic seconds
    tree: Tree | None = None  # made when it is asked for


class Gap(Exception):
    """The events between two pages are gone, or the manager is another."""


Key = tuple[str, bool]
"""Whose ("" is an admin's), and whether with what is in the tier only."""


class Collector:
    """Collects, at most once at a time for each key."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: dict[Key, asyncio.Task[Collection]] = {}
        self._last: dict[Key, Collection] = {}
        self.turn = asyncio.Lock()  # of those who work on a collection in a thread: one at a time

    async def collect(
        self, owner: str, *, tier: bool = False, oldest: float = FRESH, boot_id: str = ""
    ) -> Collection:
        """Not older than `oldest` seconds, nor of another start than `boot_id` if that is given. Raises
        ApiError 503.
        """
        key = (owner, tier)
        last = self._last.get(key)
        fresh = last is not None and time.monotonic() - last.made <= oldest
        if last is not None and fresh and boot_id in ("", last.at.boot_id):
            return last
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._collect(owner, tier))
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    def _done(self, key: Key, task: "asyncio.Task[Collection]") -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._drop(key)
            self._last[key] = task.result()
            if len(self._last) > MAX_KEPT:
                self._drop(next(iter(self._last)))
            asyncio.get_running_loop().call_later(FRESH, self._forget, key)

    def _forget(self, key: Key) -> None:
        """What nobody asks for any more is not kept."""
        last = self._last.get(key)
        if last is not None and time.monotonic() - last.made >= FRESH:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        """In a thread: what has 100,000 objects takes long to take apart."""
        dropped = [self._last.pop(key, None)]
        asyncio.get_running_loop().run_in_executor(None, dropped.clear)

    async def _collect(self, owner: str, tier: bool) -> Collection:
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(owner, tier)
            except Gap:
                continue
        message = f"the cache changed faster than it could be read, {MAX_ATTEMPTS} times; try again"
        raise from_pagekeeper(PagekeeperError("not_ready", message, RETRY_AFTER))

    async def _attempt(self, owner: str, tier: bool) -> Collection:
        pages = await self._pages(owner, "pool")
        slots = await self._pages(owner, "disk") if tier else []
        events, at = await self._events(owner, [*pages, *slots])
        with uncollected():
            return await asyncio.to_thread(merge, pages, slots, events, at, bool(owner))

    async def _pages(self, owner: str, tier: Literal["pool", "disk"]) -> list[BlocksPage]:
        pages: list[BlocksPage] = []
        first, end = 0, 1
        while first < end:
            query = partial(BlocksQuery, first=first, limit=MAX_PAGE, content=True, tenant=owner, tier=tier)
            page = await ask(self._backend, query, BlocksPage)
            pages.append(page)
            first, end = first + max(1, len(page.states)), page.num_blocks
        return pages

    async def _events(self, owner: str, pages: list[BlocksPage]) -> tuple[list[CacheEvent], At]:
        """Those since the first page, and where they end."""
        at, end = pages[0].at, pages[-1].at
        if any(page.at.boot_id != at.boot_id for page in pages):
            raise Gap
        found: list[CacheEvent] = []
        while at.sequence < end.sequence:
            query = partial(EventsQuery, boot_id=at.boot_id, after=at.sequence, tenant=owner)
            page = await ask(self._backend, query, EventsPage)
            if page.gap or page.at.boot_id != at.boot_id or page.at.sequence <= at.sequence:
                raise Gap
            found += page.events
            at = page.at
        return found, at


def breathe() -> None:
    """Let the event loop run: a thread that only computes gives up the interpreter every 5 ms at best."""
    time.sleep(0)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For what makes many objects that stay: looking through them all, again and again, holds up the loop."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def merge(
    pages: list[BlocksPage], slots: list[BlocksPage], events: list[CacheEvent], at: At, owned: bool = False
) -> Collection:
    """What is there after the last event. Runs beside the event loop. `owned`: by a tenant, who is not told
    where its blocks lie.
    """
    head = pages[0]
    contents = Contents(head.num_blocks, head.block_size, head.block_bytes, head.root)
    for page in pages:
        contents.add(page)
        breathe()
    for page in slots:
        contents.add_tier(page)
        breathe()
    for event in events:
        contents.apply(event)
    if owned:
        contents.block = own_numbers(contents.hashes)
        contents.order = sorted(range(len(contents)), key=contents.block.__getitem__)
    return Collection(at, contents, time.monotonic())
