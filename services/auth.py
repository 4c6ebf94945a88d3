"""API keys: `Authorization: Bearer <key>`, compared in constant time."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""What load balancers and scrapers ask without a key."""


class ApiKeys:
    """ASGI middleware; without keys it lets everything through."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            header = Headers(scope=scope).get("authorization", "")
            if not self._allowed(header):
                await _refusal(header).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        """Every key is looked at, so that the time tells nothing of which one came close."""
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found) and scheme.lower() == "bearer"


def _refusal(header: str) -> ApiError:
    message = (
        "the API key is not one of this server's"
        if header
        else "an API key is needed: send the header `Authorization: Bearer <key>`"
    )
    return ApiError(
        401, message, code="invalid_api_key", headers={"www-authenticate": 'Bearer realm="pagekeeper"'}
    )
