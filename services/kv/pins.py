"""GET, POST and DELETE /kv/pins: named holds on cached prefixes.

Whoever may pin may keep memory from others, so these routes ask who calls, as all of /kv/ does. A tenant's
pins are its own, names and all.
"""

import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import MAX_ID_CHARS, Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from services.api.validation import decode_request
from services.auth import observer
from services.context import Context
from services.errors import from_pagekeeper, invalid
from services.kv.answers import PinCard, PinList
from services.kv.ask import RETRY_AFTER, Parameters, ask, reply
from services.kv.prompt import check_prompt, prompt_tokens
from services.kv.types import PinRequest

DEFAULT_TTL: Final = 3600.0  # seconds
TENANT: Final = re.compile("[0-9a-f]{32}")
LONGEST_TTL: Final = 30 * 86400.0  # seconds

_decoder = msgspec.json.Decoder(PinRequest)


class PinsRoute:
    """The three methods."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """One path."""
        path = "/kv/pins"
        return [
            Route(path, self.list),
            Route(path, self.add, methods=["POST"]),
            Route(path, self.remove, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        tenant = self._tenant(request)
        Parameters(request, ())
        answer = await self._ask(lambda number: PinsQuery(number, tenant))
        pins = [card(pin, admin=not tenant) for pin in answer.pins]
        return reply(PinList(pins, answer.pinned_blocks, answer.budget_blocks))

    async def add(self, request: Request) -> Response:
        tenant = self._tenant(request)
        body = await decode_request(request, _decoder, self._context.config)
        ttl = check(body)
        tokens = await prompt_tokens(self._context.model, body)
        answer = await self._ask(
            lambda number: Pin(number, body.name, tokens, body.cache_salt or "", ttl, tenant)
        )
        (pin,) = (pin for pin in answer.pins if pin.name == body.name)
        return reply(card(pin))

    async def remove(self, request: Request) -> Response:
        tenant = self._tenant(request)
        given = Parameters(request, ("name",) if tenant else ("name", "tenant"))
        name, owner = given.text("name", MAX_ID_CHARS), given.text("tenant", 64)
        if not name:
            message = "the pin's name is missing: DELETE /kv/pins?name=…"
            raise invalid("name", message, "missing_required_parameter")
        if owner and not TENANT.fullmatch(owner):
            raise invalid("tenant", f"`tenant` is {owner!r}; want one as GET /kv/pins names it")
        await self._ask(lambda number: Unpin(number, name, tenant or owner))
        return Response(b"{}", media_type="application/json")

    def _tenant(self, request: Request) -> str:
        return observer(request, self._context.config).tenant

    async def _ask(self, message: Callable[[int], Pin | Unpin | PinsQuery]) -> PinsAnswer:
        """Raises ApiError: no answer, or what the manager refused."""
        answer = await ask(self._context.backend, message, PinsAnswer)
        if answer.code:
            refused = from_pagekeeper(PagekeeperError(answer.code, answer.message, RETRY_AFTER))
            refused.param = {"not_found": "name", "not_cached": "prompt"}.get(answer.code)
            raise refused
        return answer


def check(body: PinRequest) -> float:
    """Everything that can be said without the model. Returns the time to live; raises ApiError 400."""
    if not (1 <= len(body.name) <= MAX_ID_CHARS and body.name.isprintable()):
        raise invalid("name", f"`name` is not 1 to {MAX_ID_CHARS} printable characters")
    ttl = DEFAULT_TTL if body.ttl is None else body.ttl
    if not 1 <= ttl <= LONGEST_TTL:
        raise invalid("ttl", f"`ttl` is {ttl:g}; want 1 to {LONGEST_TTL:g} seconds")
    check_prompt(body)
    return ttl


def card(pin: Pinned, *, admin: bool = False) -> PinCard:
    owner = pin.tenant if admin and pin.tenant else UNSET
    return PinCard(pin.name, pin.blocks, pin.tokens, round(pin.expires_in, 3), owner)
