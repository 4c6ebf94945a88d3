"""`X-Request-Id`: the client's own is sent back and logged; without one, or with an odd one, it is made
here.

It is a label for people only: inside, every call has an id of its own, so two calls with the same label
never meet.
"""

import re
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_ALLOWED: Final = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")


class RequestIds:
    """ASGI middleware; the id is in `scope["state"]["request_id"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ALLOWED.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
