"""What uvicorn leaves open: how long a request's head may be, and how long it may take to come.

A body has its limits in `services.api.validation`; the head is read before there is a request to refuse.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.errors import ApiError

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together. One read more may come before it is noticed (256 KiB)."""

REASONS: Final = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedHead(HttpToolsProtocol):
    """One connection. From the first byte it may send (after an answer: from the next byte that it sends) the
    client has `head_seconds` for a whole head of at most MAX_HEAD_BYTES.
    """

    head_seconds: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes", "request_too_large")
        elif self._timer is None and self._head_bytes:  # none: it came whole, and its answer may take long
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self._overdue)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the request's head did not arrive within {self.head_seconds:g} s", "timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, unless the answer to an earlier request is still on its way; then close."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            body = ApiError(status, message, code=code).body()
            head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n" % (
                status,
                REASONS[status],
            )
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


def bounded_head(seconds: float) -> type[BoundedHead]:
    """The protocol class for `uvicorn.Config(http=…)`, with its limit in seconds."""
    return type("BoundedHead", (BoundedHead,), {"head_seconds": seconds})
