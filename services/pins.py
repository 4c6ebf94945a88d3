"""GET, POST and DELETE /kv/pins: named holds on cached prefixes.

Whoever may pin may keep memory from others, so these routes need a key; where no keys are set they are served
only to this machine.
"""

import ipaddress
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import MAX_ID_CHARS, Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from services.chat import render_prompt
from services.completions import encode_text
from services.config import FrontendConfig, split_list
from services.context import Context, ServedModel
from services.errors import ApiError, from_pagekeeper, invalid
from services.openai_types import PinRequest, TokenizeRequest
from services.validation import MAX_SALT_CHARS, decode_request, token_ids

TIMEOUT: Final = 5.0  # seconds
DEFAULT_TTL: Final = 3600.0  # seconds
LONGEST_TTL: Final = 30 * 86400.0  # seconds
RETRY_AFTER: Final = 1.0  # seconds

_decoder = msgspec.json.Decoder(PinRequest)


class PinCard(msgspec.Struct):
    """One pin, as JSON."""

    name: str
    blocks: int
    tokens: int
    expires_in: float  # seconds


class PinList(msgspec.Struct):
    data: list[PinCard]
    pinned_blocks: int
    budget_blocks: int
    object: str = "list"


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
        answer = await self._ask(PinsQuery)
        pins = [card(pin) for pin in answer.pins]
        return _json(PinList(pins, answer.pinned_blocks, answer.budget_blocks))

    async def add(self, request: Request) -> Response:
        check_rights(self._context.config)
        body = await decode_request(request, _decoder, self._context.config)
        ttl = check(body)
        tokens = await prompt_tokens(self._context.model, body)
        answer = await self._ask(lambda number: Pin(number, body.name, tokens, body.cache_salt or "", ttl))
        (pin,) = (pin for pin in answer.pins if pin.name == body.name)
        return _json(card(pin))

    async def remove(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        if not name:
            message = "the pin's name is missing: DELETE /kv/pins?name=…"
            raise invalid("name", message, "missing_required_parameter")
        await self._ask(lambda number: Unpin(number, name))
        return Response(b"{}", media_type="application/json")

    async def _ask(self, message: Callable[[int], Pin | Unpin | PinsQuery]) -> PinsAnswer:
        """Raises ApiError: no rights, no answer, or what the manager refused."""
        check_rights(self._context.config)
        answer = await self._context.backend.pins(message, TIMEOUT)
        if answer is None:
            text = f"the KV manager does not answer (within {TIMEOUT:g} s); it may still do what was asked"
            raise from_pagekeeper(PagekeeperError("manager_absent", text, RETRY_AFTER))
        if answer.code:
            raise from_pagekeeper(PagekeeperError(answer.code, answer.message, RETRY_AFTER))
        return answer


def check_rights(config: FrontendConfig) -> None:
    """A request that comes here has a good key where keys are set. Raises ApiError 403."""
    keys_are_set = bool(split_list(config.api_keys) or config.api_keys_file)
    if not keys_are_set and not is_loopback(config.host):
        raise ApiError(
            403,
            f"without API keys /kv/pins is served on loopback addresses only, and this frontend listens on "
            f"{config.host}: set api_keys or api_keys_file, or host to 127.0.0.1",
            code="forbidden",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(body: PinRequest) -> float:
    """Everything that can be said without the model. Returns the time to live; raises ApiError 400."""
    if not (1 <= len(body.name) <= MAX_ID_CHARS and body.name.isprintable()):
        raise invalid("name", f"`name` is not 1 to {MAX_ID_CHARS} printable characters")
    ttl = DEFAULT_TTL if body.ttl is None else body.ttl
    if not 1 <= ttl <= LONGEST_TTL:
        raise invalid("ttl", f"`ttl` is {ttl:g}; want 1 to {LONGEST_TTL:g} seconds")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT_CHARS:
        message = f"`cache_salt` has {len(body.cache_salt)} characters; want 1 to {MAX_SALT_CHARS}"
        raise invalid("cache_salt", message)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either `prompt` or `messages`")
    return ttl


async def prompt_tokens(model: ServedModel, body: PinRequest) -> tuple[int, ...]:
    """As the completion routes make them. Raises ApiError 400 or 404."""
    model.check_name(body.model)
    field = "prompt"
    if isinstance(body.prompt, str):
        tokens = tuple(await encode_text(model, body.prompt, body.add_special_tokens is not False))
    elif body.prompt is not None:
        tokens = token_ids("prompt", body.prompt, model.tokenizer.vocab_size)
    else:
        field, chat = "messages", TokenizeRequest(messages=body.messages)
        chat.add_special_tokens = body.add_special_tokens
        chat.add_generation_prompt = body.add_generation_prompt
        chat.continue_final_message = body.continue_final_message
        chat.chat_template_kwargs = body.chat_template_kwargs
        tokens = tuple(await render_prompt(model, chat))
    if not 1 <= len(tokens) <= model.max_model_len:
        message = f"`{field}` has {len(tokens)} tokens; want 1 to {model.max_model_len}"
        raise invalid(field, message, "context_length_exceeded" if tokens else "invalid_value")
    return tokens


def card(pin: Pinned) -> PinCard:
    return PinCard(pin.name, pin.blocks, pin.tokens, round(pin.expires_in, 3))


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
