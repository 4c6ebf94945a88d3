"""POST /kv/warm, /kv/evict and /kv/clear: commands on what is cached."""

import asyncio
import time
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    At,
    Clear,
    Cleared,
    EventsPage,
    EventsQuery,
    Evict,
    RequestsPage,
    RequestsQuery,
    SamplingParams,
)
from services.api.call import Call, Identity, new_call
from services.api.client_link import ClientLink
from services.api.openai_types import CompletionRequest
from services.api.sse import SSE_HEADERS, Answer
from services.api.validation import decode_request
from services.auth import observer
from services.context import Context
from services.errors import STOPPING, ApiError, ErrorBody, from_pagekeeper, invalid
from services.kv import answers
from services.kv.ask import RETRY_AFTER, TIMEOUT, ask, holder_card, reply
from services.kv.events import event, last_words
from services.kv.prompt import check_prompt, prompt_tokens
from services.kv.types import ClearRequest, EvictRequest, WarmRequest
from services.request_log import log_answer

PROGRESS_PERIOD: Final = 0.25  # seconds
EVICT_SECONDS: Final = 30.0
MAX_PRIORITY: Final = (1 << 31) - 1

_warm = msgspec.json.Decoder(WarmRequest)
_evict = msgspec.json.Decoder(EvictRequest)
_clear = msgspec.json.Decoder(ClearRequest)


class ControlRoutes:
    """The three."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._backend = context.backend
        self._config = context.config

    def routes(self) -> list[Route]:
        return [
            Route("/kv/warm", self.warm, methods=["POST"]),
            Route("/kv/evict", self.evict, methods=["POST"]),
            Route("/kv/clear", self.clear, methods=["POST"]),
        ]

    async def warm(self, request: Request) -> Answer:
        tenant = observer(request, self._config).tenant
        body = await decode_request(request, _warm, self._config)
        check_prompt(body)
        if body.priority is not None and not -MAX_PRIORITY - 1 <= body.priority <= MAX_PRIORITY:
            raise invalid("priority", f"`priority` is {body.priority}; want 32 bits")
        tokens = await prompt_tokens(self._context.model, body)
        if len(tokens) >= self._context.model.max_model_len:
            field = "prompt" if body.messages is None else "messages"
            message = (
                f"`{field}` has {len(tokens)} tokens; want fewer than {self._context.model.max_model_len}"
            )
            raise invalid(field, message, "context_length_exceeded")
        return WarmResponse(self._context, warm_call(self._context, body, tokens, tenant), tenant)

    async def evict(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        body = await decode_request(request, _evict, self._config)
        check_prompt(body, needed=False)
        about_text = body.prompt is not None or body.messages is not None
        if body.all and (about_text or body.cache_salt is not None):
            raise invalid("all", "`all` is everything: give it without `prompt`, `messages` and `cache_salt`")
        if not (body.all or about_text or body.cache_salt is not None):
            raise invalid("prompt", "give `prompt` or `messages`, or `cache_salt`, or `all`: true")
        tokens = await prompt_tokens(self._context.model, body) if about_text else ()
        salt = body.cache_salt or ""
        return await self._until_done(Evict(0, tokens, salt, all_salts=bool(body.all), tenant=tenant))

    async def clear(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        body = await decode_request(request, _clear, self._config)
        return await self._until_done(Clear(0, bool(body.force), tenant))

    async def _until_done(self, command: Evict | Clear) -> Response:
        """In pieces, as the manager does it."""
        evicted, end = 0, time.monotonic() + EVICT_SECONDS
        while True:
            done = await ask(self._backend, partial(_numbered, command), Cleared)
            evicted += done.evicted
            if done.code:
                return refusal(done)
            if not done.more:
                break
            if time.monotonic() >= end:
                text = f"not done after {EVICT_SECONDS:g} s, {evicted} blocks are evicted; ask again to go on"
                raise from_pagekeeper(PagekeeperError("manager_absent", text, RETRY_AFTER))
            if done.prefix:
                command = msgspec.structs.replace(command, token_ids=(), prefix=done.prefix)
        answer = answers.EvictAnswer(
            boot_id=done.at.boot_id, sequence=done.at.sequence, evicted=evicted, in_use=done.in_use
        )
        return reply(answer)


def _numbered(command: Evict | Clear, query_id: int) -> Evict | Clear:
    return msgspec.structs.replace(command, query_id=query_id)


def refusal(done: Cleared) -> Response:
    """409 with who stands in the way; anything else as any error."""
    if not done.blockers:
        raise from_pagekeeper(PagekeeperError(done.code, done.message, RETRY_AFTER))
    error = ErrorBody(done.message, "invalid_request_error", None, done.code)
    blockers = [holder_card(holder) for holder in done.blockers]
    return reply(answers.ClearRefused(error, done.in_use, blockers), 409)


# --- warm ---------------------------------------------------------------------------------------------------


def warm_call(context: Context, body: WarmRequest, tokens: tuple[int, ...], tenant: str) -> Call:
    """A run of which only the prompt matters: its one token is not shown."""
    form = CompletionRequest(
        prompt="", cache_salt=body.cache_salt, priority=body.priority, stream=body.stream
    )
    call = new_call(
        context,
        form,
        Identity.new("warm", tenant),
        route="/kv/warm",
        prompts=[tokens],
        sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
        num_choices=1,
        continues_prompt=False,
    )
    call.hidden_tokens = 1
    return call


class WarmResponse:
    """An ASGI application that runs the call, and says how far it is where that is asked for."""

    def __init__(self, context: Context, call: Call, tenant: str) -> None:
        self._context = context
        self._backend = context.backend
        self._call = call
        self._tenant = tenant
        self._request = call.generations[0].request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._context.config.client_timeout_seconds
        client = ClientLink(receive, send, seconds, self._call.signal.wake)
        status = 499
        try:
            self._backend.submit(self._call.generations[0])
            await (self._stream(client) if self._call.stream else self._wait(client))
            if not client.gone:
                await self._answer(client, scope, receive, send)
                status = 200
        except (ApiError, PagekeeperError) as error:
            refused = error if isinstance(error, ApiError) else from_pagekeeper(error)
            status = refused.status
            if not client.started:
                raise refused from None
            await client.end(last_words(refused))
        except asyncio.CancelledError:  # the server's drain time is over
            status = STOPPING.status
            if not client.started:
                raise STOPPING.again() from None
            await client.end(last_words(STOPPING))
            raise
        finally:
            client.close()
            self._backend.cancel(self._call.generations[0])
            log_answer(self._context, self._call, scope, status)

    @property
    def _over(self) -> bool:
        if self._call.error is not None:
            raise self._call.error
        return self._call.done

    async def _wait(self, client: ClientLink) -> None:
        while not self._over and not client.gone:
            await self._call.signal.wait()

    async def _stream(self, client: ClientLink) -> None:
        """Nothing is sent before the first look at how far it is, so that a refusal has its own status."""
        said = -1
        while not client.gone:
            await self._call.signal.wait(PROGRESS_PERIOD)
            if self._over:
                return
            computed = await self._computed()
            if not client.started:
                await client.start(SSE_HEADERS)
            if computed != said:
                total = len(self._request.prompt_token_ids)
                await client.send(event("progress", answers.WarmProgress(computed, total), None))
                said = computed

    async def _computed(self) -> int:
        """Tokens of the prompt that are in its blocks, as the manager knows it."""
        query = partial(RequestsQuery, request_id=self._request.request_id, tenant=self._tenant)
        page = await self._backend.ask(query, TIMEOUT)
        if not isinstance(page, RequestsPage) or not page.requests or not page.requests[0].sequences:
            return 0
        return min(page.requests[0].sequences[0].num_computed, len(self._request.prompt_token_ids))

    async def _answer(self, client: ClientLink, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self._backend.ask(partial(EventsQuery, limit=1, tenant=self._tenant), TIMEOUT)
        at = page.at if isinstance(page, EventsPage) else At("", 0)
        request = self._request
        total, cached = len(request.prompt_token_ids), request.num_cached_tokens
        took = round(self._call.generations[0].last_token_at - request.arrival, 3)
        body = answers.WarmAnswer(
            boot_id=at.boot_id,
            sequence=at.sequence,
            tokens=total,
            cached_tokens=cached,
            computed_tokens=total - cached,
            seconds=took,
        )
        if not self._call.stream:
            await reply(body)(scope, receive, send)
            return
        if not client.started:
            await client.start(SSE_HEADERS)
        await client.send(event("done", body, None), more=False)
