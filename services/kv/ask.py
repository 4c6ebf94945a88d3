"""Questions to the KV manager on behalf of a route, query parameters, and the form of the answers."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import Answer, HolderInfo, Query
from kvmanager.protocol import BlockRef as Ref
from services.backend import Backend
from services.errors import from_pagekeeper, invalid
from services.kv.answers import BlockRef, HolderCard

TIMEOUT: Final = 5.0  # seconds
RETRY_AFTER: Final = 1.0  # seconds
MAX_SHOWN_CHARS: Final = 80  # of what a client wrote, in an error

A = TypeVar("A", bound=Answer)


async def ask(backend: Backend, message: Callable[[int], Query], kind: type[A]) -> A:
    """The answer. Raises ApiError 503 if none comes."""
    answer = await backend.ask(message, TIMEOUT)
    if answer is None:
        text = f"the KV manager does not answer (within {TIMEOUT:g} s)"
        raise from_pagekeeper(PagekeeperError("manager_absent", text, RETRY_AFTER))
    assert isinstance(answer, kind)
    return answer


def reply(body: msgspec.Struct, status: int = 200) -> Response:
    """As JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def ref(block: Ref) -> BlockRef:
    return BlockRef(*block)


def holder_card(holder: HolderInfo) -> HolderCard:
    return HolderCard(
        holder.kind,
        holder.name,
        holder.client,
        holder.blocks,
        holder.choice,
        round(holder.seconds_silent, 3),
        holder.stuck,
    )


class Parameters:
    """The query of a request's URL. Each method raises ApiError 400 that names the parameter."""

    def __init__(self, request: Request, known: Sequence[str]) -> None:
        self._given = dict(request.query_params)
        for name in self._given:
            if len(request.query_params.getlist(name)) > 1:
                shown = name[:MAX_SHOWN_CHARS]
                raise invalid(shown, f"`{shown}` is given more than once", "repeated_parameter")
            if name not in known:
                shown = name[:MAX_SHOWN_CHARS]
                message = f"unknown query parameter `{shown}`; known are {', '.join(known) or 'none'}"
                raise invalid(shown, message, "unknown_parameter")

    def text(self, name: str, longest: int) -> str:
        """ "" if it is not given."""
        value = self._given.get(name, "")
        if len(value) > longest:
            raise invalid(name, f"`{name}` has {len(value)} characters; want at most {longest}")
        return value

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._given.get(name)
        if value is None:
            return default
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 16 and low <= int(value) <= high):
            shown = value[:MAX_SHOWN_CHARS]
            raise invalid(name, f"`{name}` is {shown!r}; want a whole number from {low} to {high}")
        return int(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """The first one if it is not given."""
        value = self._given.get(name, allowed[0])
        if value not in allowed:
            shown = value[:MAX_SHOWN_CHARS]
            raise invalid(name, f"`{name}` is {shown!r}; want one of {', '.join(allowed)}")
        return value

    def digest(self, name: str) -> bytes:
        """A block's hash, in hex; empty if it is not given."""
        value = self._given.get(name, "")
        try:
            found = bytes.fromhex(value)
        except ValueError:
            found = b"?"
        if len(found) not in (0, 32):
            shown = value[:MAX_SHOWN_CHARS]
            raise invalid(name, f"`{name}` is {shown!r}; want a block's hash, 64 hex digits")
        return found
