"""GET and DELETE /v1/streams/{id}: go on with a resumable stream, or end it, on any frontend."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.api.openai_responses import DeletedStream
from services.api.sse import SSE_HEADERS, Answer
from services.config import FrontendConfig
from services.errors import ApiError, invalid
from services.streams.registry import STREAM_IDS, Streams, owner_of
from services.streams.tail import STREAM_ID, Source, Tail, gone, no_stream

HEADER: Final = "last-event-id"


class StreamsRoute:
    """Both methods."""

    def __init__(self, config: FrontendConfig, streams: Streams) -> None:
        self._config = config
        self._streams = streams

    def routes(self) -> list[Route]:
        """One path."""
        path = "/v1/streams/{id}"
        return [Route(path, self.resume), Route(path, self.remove, methods=["DELETE"])]

    async def remove(self, request: Request) -> Response:
        stream_id = _stream_id(request)
        await self._streams.discard(stream_id, owner_of(request))
        return Response(msgspec.json.encode(DeletedStream(stream_id)), media_type="application/json")

    async def resume(self, request: Request) -> Answer:
        stream_id, after = _stream_id(request), _last_event(request)
        source = await self._streams.source(stream_id, owner_of(request))
        try:
            answer = self._answer(request, source, after)
        except ApiError:
            await source.close()
            raise
        if not isinstance(answer, Tail):
            await source.close()
        return answer

    def _answer(self, request: Request, source: Source, after: int | None) -> Answer:
        state = source.state
        first, last = state.ring.first, state.ring.next - 1
        after = first - 1 if after is None else after
        if after > last:
            raise invalid("Last-Event-ID", f"`Last-Event-ID` is {after}; the stream has got to event {last}")
        if after + 1 < first:
            raise gone(after, first)
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        headers[STREAM_ID.decode()] = state.spec.id
        if state.ended and after == last:
            return Response(status_code=204, headers={STREAM_ID.decode(): state.spec.id})
        if request.method == "HEAD":
            return Response(headers=headers)
        return Tail(self._config, source, after)


def _stream_id(request: Request) -> str:
    """Raises ApiError 404 for what can be none."""
    stream_id: str = request.path_params["id"]
    if not STREAM_IDS.fullmatch(stream_id):
        raise no_stream(stream_id)
    return stream_id


def _last_event(request: Request) -> int | None:
    """The number in the header. Raises ApiError 400."""
    given = request.headers.get(HEADER, "").strip()
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise invalid("Last-Event-ID", f"`Last-Event-ID` is {given[:40]!r}; want an event's number")
    return int(given)
