"""GET /v1/streams/{id}: go on with a resumable stream, on any frontend."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from services.config import FrontendConfig
from services.errors import ApiError, invalid
from services.sse import SSE_HEADERS, Answer
from services.stream_tail import STREAM_ID, Source, Tail, gone
from services.streams import STREAM_IDS, Streams, no_stream, owner_of

HEADER: Final = "last-event-id"


class StreamsRoute:
    """The endpoint."""

    def __init__(self, config: FrontendConfig, streams: Streams) -> None:
        self._config = config
        self._streams = streams

    async def resume(self, request: Request) -> Answer:
        stream_id = request.path_params["id"]
        after = _last_event(request)
        if not STREAM_IDS.fullmatch(stream_id):
            raise no_stream(stream_id)
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


def _last_event(request: Request) -> int | None:
    """The number in the header. Raises ApiError 400."""
    given = request.headers.get(HEADER, "").strip()
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise invalid("Last-Event-ID", f"`Last-Event-ID` is {given[:40]!r}; want an event's number")
    return int(given)
