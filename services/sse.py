"""Answer a call, all at once or as server-sent events; and notice when its client goes away."""

import asyncio
import time
from typing import Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from kvmanager.errors import PagekeeperError
from services.call import Call
from services.context import Context
from services.errors import ApiError, from_pagekeeper
from services.generation import ChoiceStream
from services.request_log import LOGGED, log_call

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Renderer(Protocol):
    """A route's form of the answer; the methods with events return whole ones, as bytes."""

    def first(self) -> bytes:
        """Events before any text."""

    def text(self, number: int, choice: ChoiceStream) -> bytes:
        """The event with what `choice` of prompt `number` has to read."""

    def finish(self, number: int, choice: ChoiceStream) -> bytes:
        """The event that ends a choice."""

    def usage(self) -> bytes:
        """The event with the usage."""

    def whole(self) -> bytes:
        """The JSON of the whole answer."""


class CallResponse:
    """An ASGI application that runs `call` and answers in `renderer`'s form."""

    def __init__(self, context: Context, call: Call, renderer: Renderer) -> None:
        self._context = context
        self._call = call
        self._renderer = renderer
        self._gone = False
        self._open = {
            (number, choice): None
            for number, generation in enumerate(call.generations)
            for choice in generation.choices
        }  # choices that have not ended in the stream, in order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        status = 499  # nginx's "client closed request": stays if nothing else comes
        try:
            for generation in self._call.generations:
                self._context.backend.submit(generation)
            if await (self._stream(send) if self._call.stream else self._answer(send)):
                status = 200
        except PagekeeperError as error:
            status = from_pagekeeper(error).status
            raise
        except ApiError as error:
            status = error.status
            raise
        except Exception:
            status = 500
            raise
        finally:
            watcher.cancel()
            for generation in self._call.generations:
                self._context.backend.cancel(generation)
            self._record(scope, status)

    async def _watch(self, receive: Receive) -> None:
        """Wait for the client to go away."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self._gone = True
        self._call.signal.wake()

    @property
    def _done(self) -> bool:
        return all(generation.done for generation in self._call.generations)

    def _error(self) -> ApiError | None:
        for generation in self._call.generations:
            if generation.request.error is not None:
                return from_pagekeeper(generation.request.error)
        return None

    async def _answer(self, send: Send) -> bool:
        while not self._gone and not self._done and self._error() is None:
            await self._call.signal.wait()
        if (error := self._error()) is not None:
            raise error
        if self._gone:
            return False
        body = self._renderer.whole()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    async def _stream(self, send: Send) -> bool:
        """Whether the client got all of it. Nothing is sent before the first token or the first keep-alive,
        so that a refusal has its own status.
        """
        silence = self._context.config.keep_alive_seconds
        woken = await self._call.signal.wait(silence)
        if (error := self._error()) is not None:
            raise error
        data = self._renderer.first()
        if not self._gone:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while not self._gone:
            data += self._collect() or (b"" if woken else KEEP_ALIVE)
            error = self._error()
            if error is not None or self._done:
                data += event(error.body()) if error else self._last_events()
                return await self._send(send, data + DONE, more=False)
            if data:
                await self._send(send, data)
            data = b""
            woken = await self._call.signal.wait(silence)
        return False

    def _last_events(self) -> bytes:
        return self._renderer.usage() if self._call.include_usage else b""

    def _collect(self) -> bytes:
        """Events for all that there is to read now: one per choice, however many tokens that is."""
        data = b""
        for number, choice in list(self._open):
            if choice.readable:
                data += self._renderer.text(number, choice)
            if choice.closed:
                data += self._renderer.finish(number, choice)
                del self._open[number, choice]
        return data

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> bool:
        """Whether it was taken. Waits while the client does not read, within `client_timeout_seconds`; then
        the client counts as gone.
        """
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            async with asyncio.timeout(self._context.config.client_timeout_seconds):
                await send(message)
        except TimeoutError:
            self._gone = True
            return False
        return True

    def _record(self, scope: Scope, status: int) -> None:
        state = scope.setdefault("state", {})
        state[LOGGED] = True
        log_call(
            self._context,
            self._call,
            request_id=state.get("request_id", ""),
            status=status,
            error=self._error(),
            now=time.monotonic(),
        )
