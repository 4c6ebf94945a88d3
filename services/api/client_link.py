"""The connection of one client while it is answered: notices when the client goes away, sends within
bounds.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import Message, Receive, Send

LAST_WORDS_WITHIN: Final = 1.0  # seconds; a process that ends does not wait for slow clients

Headers = list[tuple[bytes, bytes]]


class ClientLink:
    """`seconds` bounds how long the client may not read; then it counts as gone. `wake` is called once it is
    gone.
    """

    def __init__(self, receive: Receive, send: Send, seconds: float, wake: Callable[[], None]) -> None:
        self.gone = False
        self.started = False
        self._send = send
        self._seconds = seconds
        self._wake = wake
        self._watcher = asyncio.create_task(self._watch(receive))

    async def start(self, headers: Headers) -> None:
        """Status 200, and the headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, data: bytes, *, more: bool = True) -> bool:
        """Whether the client took it."""
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            self.gone = True
        return not self.gone

    async def end(self, data: bytes) -> None:
        """The last words of an answer that is cut short; for one that has not begun there are none."""
        if self.started and not self.gone:
            self._seconds = min(self._seconds, LAST_WORDS_WITHIN)
            await self.send(data, more=False)

    def close(self) -> None:
        self._watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        self._wake()
