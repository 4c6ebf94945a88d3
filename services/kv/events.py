"""GET /kv/events: what changes in the cache, as server-sent events: a snapshot, then the tail.

Each client has its own place in the manager's numbered events and reads on from there: nothing is queued for
it here, and one that does not read is dropped. A client that was away comes back with `Last-Event-ID`; what
the manager no longer has is a gap, and a new snapshot follows.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvmanager.protocol import FLAG_IN_TIER, At, CacheEvent, EventsPage, EventsQuery
from services.api.client_link import ClientLink
from services.api.sse import KEEP_ALIVE, SSE_HEADERS, Answer
from services.auth import observer
from services.context import Context
from services.errors import STOPPING, ApiError, invalid
from services.kv import answers
from services.kv.ask import Parameters, ask
from services.kv.collect import FRESH, Collection, Collector
from services.kv.contents import TOKEN_BYTES
from services.kv.pages import text_bytes, unpacked
from services.text.tokenizer import Tokenizer

PERIOD: Final = 0.1  # seconds between two looks for events
PAGE: Final = 256  # events of one look
CHUNK: Final = 1024  # blocks of one event of a snapshot
MAX_FOLLOWERS: Final = 64  # of one frontend
MAX_OWN_FOLLOWERS: Final = 16  # of those, a tenant's
KEPT_PLACES: Final = 8  # of those, an admin's alone
_ID = re.compile(r"([0-9A-Za-z_-]{1,64}):(\d{1,15})")


class EventsRoute:
    """The endpoint."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._context = context
        self._collector = collector
        self._followers: Counter[str] = Counter()  # by tenant

    def routes(self) -> list[Route]:
        return [Route("/kv/events", self.follow)]

    async def follow(self, request: Request) -> Answer:
        """Everything that can be refused is refused before the stream begins."""
        tenant = observer(request, self._context.config).tenant
        given = Parameters(request, ("snapshot",))
        snapshot = given.choice("snapshot", ("1", "0")) == "1"
        since = read_id(request.headers.get("last-event-id", ""))
        query = partial(EventsQuery, limit=1, tenant=tenant)
        now = (await ask(self._context.backend, query, EventsPage)).at
        # nothing waits from here until it is counted: many come at once
        total, own = self._followers.total(), self._followers[tenant]
        if total >= MAX_FOLLOWERS or (tenant and own >= own_places(MAX_FOLLOWERS - total)):
            whose = f"{own} with this key" if tenant else f"{total}"
            message = f"{whose} clients follow the events of this frontend; there is no room for more"
            raise ApiError(429, message, code="too_many_followers", headers={"retry-after": "5"})
        if request.method == "HEAD":
            return Response(headers={name.decode(): value.decode() for name, value in SSE_HEADERS})
        follower = Follower(self._context, self._collector, tenant)
        follower.at = since or now
        return EventStream(self, self._context, tenant, follower.events(snapshot and since is None))

    def count(self, tenant: str, change: int) -> None:
        self._followers[tenant] += change


def own_places(free: int) -> int:
    """So many a tenant may have while so many are free: the fewer they are, the fewer, so that some are left
    for who has none yet.
    """
    return min(MAX_OWN_FOLLOWERS, free - KEPT_PLACES)


def read_id(text: str) -> At | None:
    """`<boot_id>:<sequence>`, as we gave it. Raises ApiError 400."""
    if not text:
        return None
    found = _ID.fullmatch(text)
    if found is None:
        raise invalid("Last-Event-ID", f"`Last-Event-ID` is {text[:80]!r}; want an id that an event had")
    return At(found.group(1), int(found.group(2)))


class Follower:
    """One client's place in the events."""

    def __init__(self, context: Context, collector: Collector, tenant: str) -> None:
        self.at = At("", 0)
        self._context = context
        self._collector = collector
        self._tenant = tenant

    async def events(self, snapshot: bool) -> AsyncGenerator[bytes, None]:
        """Pieces of the stream; an empty one now and then while nothing happens. Ends by ApiError only."""
        if snapshot:
            async for piece in self._snapshot(FRESH):
                yield piece
        while True:
            page = await self._page()
            if page.gap or page.at.boot_id != self.at.boot_id:
                yield gap(self.at, page.at)
                async for piece in self._snapshot(0.0):
                    yield piece
                await asyncio.sleep(PERIOD)
                continue
            self.at = page.at
            tokenizer = self._context.model.tokenizer
            yield b"".join([changed(page.at.boot_id, event, tokenizer) for event in page.events])
            if not page.more:
                await asyncio.sleep(PERIOD)

    async def _page(self) -> EventsPage:
        query = partial(
            EventsQuery, boot_id=self.at.boot_id, after=self.at.sequence, limit=PAGE, tenant=self._tenant
        )
        return await ask(self._context.backend, query, EventsPage)

    async def _snapshot(self, oldest: float) -> AsyncGenerator[bytes, None]:
        collection = await self._collector.collect(
            self._tenant, tier=True, oldest=oldest, boot_id=self.at.boot_id
        )
        contents = collection.contents
        for start in range(0, max(1, len(contents)), CHUNK):
            yield snapshot_part(collection, start, last=start + CHUNK >= len(contents))
            await asyncio.sleep(0)  # sending does not wait while there is room
        self.at = collection.at


def snapshot_part(collection: Collection, start: int, *, last: bool) -> bytes:
    """Only the last part has an id: whoever loses the connection before it gets a whole snapshot again."""
    contents, at = collection.contents, collection.at
    blocks = []
    for row in contents.shown()[start : start + CHUNK]:
        what = (
            contents.hashes[row].hex(),
            contents.parents[row].hex(),
            len(contents.tokens[row]) // TOKEN_BYTES,
        )
        if contents.blocks[row]:
            blocks.append(answers.SnapshotBlock(*what, contents.block[row], "pool"))
        if contents.flags[row] & FLAG_IN_TIER:
            blocks.append(answers.SnapshotBlock(*what, None, "disk"))
    body = answers.SnapshotEvent(boot_id=at.boot_id, sequence=at.sequence, blocks=blocks, last=last)
    return event("snapshot", body, at if last else None)


def gap(lost: At, now: At) -> bytes:
    """It has no id: only the snapshot that follows is a place from which to go on."""
    after = lost.sequence if lost.boot_id == now.boot_id else 0
    return event("gap", answers.GapEvent(boot_id=now.boot_id, sequence=now.sequence, after=after), None)


def changed(boot_id: str, change: CacheEvent, tokenizer: Tokenizer) -> bytes:
    card = answers.CacheEventCard(
        boot_id=boot_id, sequence=change.sequence, kind=change.kind, time=round(change.time, 3)
    )
    if change.kind != "cleared":
        card.tier, card.hash = change.tier, change.block_hash.hex()
        card.block = change.block if change.block >= 0 else None
    if change.kind == "stored":
        card.parent = change.parent_hash.hex()
        card.token_ids = list(unpacked(change.tokens))
        card.text = text_bytes(tokenizer, change.tokens).decode("utf-8", "replace")
    else:
        card.cause, card.request_id = change.cause, change.request_id
    return event(change.kind, card, At(boot_id, change.sequence))


def event(name: str, body: msgspec.Struct, at: At | None) -> bytes:
    """One server-sent event."""
    place = b"" if at is None else f"id: {at.boot_id}:{at.sequence}\n".encode()
    return b"event: " + name.encode() + b"\n" + place + b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream:
    """An ASGI application that sends pieces until the client goes, or takes nothing for
    `client_timeout_seconds`, or the frontend stops.
    """

    def __init__(
        self, route: EventsRoute, context: Context, tenant: str, pieces: AsyncGenerator[bytes, None]
    ) -> None:
        self._route = route
        self._tenant = tenant
        self._config = context.config
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._route.count(self._tenant, 1)
        client = ClientLink(receive, send, self._config.client_timeout_seconds, lambda: None)
        try:
            await client.start(SSE_HEADERS)
            await self._send(client, lambda: scope["app"].state.stopping())
            await client.end(last_words(STOPPING))
        except ApiError as error:
            await client.end(last_words(error))
        except asyncio.CancelledError:  # the server's drain time is over
            await client.end(last_words(STOPPING))
            raise
        finally:
            client.close()
            self._route.count(self._tenant, -1)

    async def _send(self, client: ClientLink, stopping: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        said = loop.time()
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                if client.gone or stopping():
                    return
                silent = loop.time() - said >= self._config.keep_alive_seconds
                if piece or silent:
                    await client.send(piece or KEEP_ALIVE)
                    said = loop.time()


def last_words(error: ApiError) -> bytes:
    """Why the stream ends."""
    return b"event: error\ndata: " + error.body() + b"\n\n"
