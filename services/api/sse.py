"""Answer a call, all at once or as server-sent events. Its client's going away cancels it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from kvmanager.errors import PagekeeperError
from services.api.call import Call
from services.api.client_link import ClientLink
from services.api.generation import ChoiceStream
from services.context import Context
from services.errors import INTERNAL, STOPPING, ApiError, from_pagekeeper
from services.request_log import log_answer

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
SSE_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application that answers one request."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def last_words(error: ApiError) -> bytes:
    """How a stream ends that cannot go on."""
    return event(error.body()) + DONE


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


class CallEvents:
    """What a call has to say, as events; each thing once."""

    def __init__(self, call: Call, renderer: Renderer) -> None:
        self._call = call
        self._renderer = renderer
        self._open = {
            (number, choice): None
            for number, generation in enumerate(call.generations)
            for choice in generation.choices
            if not choice.closed
        }  # choices that have not ended in the stream, in order

    def collect(self) -> list[tuple[int, ChoiceStream, bytes]]:
        """(prompt, choice, event) for all that there is to read now: one per choice, however many tokens that
        is, and one more at its end.
        """
        found = []
        for number, choice in list(self._open):
            if choice.readable:
                found.append((number, choice, self._renderer.text(number, choice)))
            if choice.closed:
                found.append((number, choice, self._renderer.finish(number, choice)))
                del self._open[number, choice]
        return found

    def usage(self) -> list[bytes]:
        """The event after the last choice's end, if it is asked for."""
        return [self._renderer.usage()] if self._call.include_usage else []


class CallResponse:
    """An ASGI application that runs `call` and answers in `renderer`'s form."""

    def __init__(self, context: Context, call: Call, renderer: Renderer) -> None:
        self._context = context
        self._call = call
        self._renderer = renderer
        self._events = CallEvents(call, renderer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientLink(
            receive, send, self._context.config.client_timeout_seconds, self._call.signal.wake
        )
        status = 499  # nginx's "client closed request": stays if nothing else comes
        try:
            for generation in self._call.generations:
                self._context.backend.submit(generation)
            if await (self._stream(client) if self._call.stream else self._answer(client)):
                status = 200
        except PagekeeperError as error:
            status = from_pagekeeper(error).status
            raise
        except ApiError as error:
            status = error.status
            raise
        except asyncio.CancelledError:  # the server's drain time is over
            status = STOPPING.status
            if not client.started:
                raise STOPPING.again() from None
            await client.end(last_words(STOPPING))
        except Exception:
            status = INTERNAL.status
            await client.end(last_words(INTERNAL))
            raise
        finally:
            client.close()
            for generation in self._call.generations:
                self._context.backend.cancel(generation)
            log_answer(self._context, self._call, scope, status)

    async def _answer(self, client: ClientLink) -> bool:
        call = self._call
        while not client.gone and not call.done and call.error is None:
            await call.signal.wait()
        if call.error is not None:
            raise from_pagekeeper(call.error)
        if client.gone:
            return False
        body = self._renderer.whole()
        await client.start(
            [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        )
        return await client.send(body, more=False)

    async def _stream(self, client: ClientLink) -> bool:
        """Whether the client got all of it. Nothing is sent before the first token or the first keep-alive,
        so that a refusal has its own status.
        """
        call = self._call
        silence = self._context.config.keep_alive_seconds
        woken = await call.signal.wait(silence)
        if (refusal := call.error) is not None:
            raise from_pagekeeper(refusal)
        data = self._renderer.first()
        if not client.gone:
            await client.start(SSE_HEADERS)
        while not client.gone:
            data += self._collect() or (b"" if woken else KEEP_ALIVE)
            error, done = call.error, call.done
            if error is not None:
                return await client.send(data + last_words(from_pagekeeper(error)), more=False)
            if done:
                return await client.send(data + b"".join(self._events.usage()) + DONE, more=False)
            if data:
                await client.send(data)
            data = b""
            woken = await call.signal.wait(silence)
        return False

    def _collect(self) -> bytes:
        return b"".join(data for _, _, data in self._events.collect())
