"""Pushes tokens to frontends, never waiting for one: what a socket does not take stays in its outbox.

A frontend that takes nothing for too long, or for which too much waits, loses what waits for it (it is most
likely dead, and the manager will cancel its requests); the others do not notice.
"""

import logging
import time
from typing import Final

import zmq

from gpu_runner.token_outbox import TokenOutbox
from kvmanager.protocol import TokenEvent, encode

log = logging.getLogger(__name__)

HIGH_WATER_MARK: Final = 256  # batches inside a socket
LINGER: Final = 2000  # milliseconds that a closed socket may take to deliver what it holds


class Frontend:
    """One frontend's socket and outbox. Times are in seconds of the monotonic clock."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, now: float) -> None:
        """Raises zmq.ZMQError for an endpoint that is none."""
        self.outbox = TokenOutbox()
        self.last_used = now
        self.refused_since: float | None = None  # since when it has not taken what waits
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.LINGER, LINGER)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.connect(endpoint)

    def push(self, now: float) -> bool:
        """Offer what waits; True if nothing waits any more."""
        if not self.outbox:
            return True
        try:
            self.socket.send(encode(self.outbox.batch()), zmq.DONTWAIT)
        except zmq.Again:
            if self.refused_since is None:
                self.refused_since = now
            return False
        self.outbox.clear()
        self.last_used, self.refused_since = now, None
        return True


class TokenSender:
    """All frontends that this runner has tokens for. Use from one thread."""

    def __init__(self, frontend_seconds: float, max_unsent_tokens: int) -> None:
        self._frontend_seconds = frontend_seconds
        self._max_unsent_tokens = max_unsent_tokens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frontends: dict[str, Frontend] = {}
        self.dropped_tokens = 0

    def prepare(self, endpoint: str) -> None:
        """Connect ahead, so that the first token finds the way open. A malformed endpoint is logged."""
        now = time.monotonic()
        if (frontend := self._frontends.get(endpoint)) is not None:
            frontend.last_used = now
            return
        try:
            self._frontends[endpoint] = Frontend(self._context, endpoint, now)
        except zmq.ZMQError as error:
            log.error("frontend unreachable endpoint=%r error=%r", endpoint, str(error))

    def send(self, events: dict[str, list[TokenEvent]]) -> None:
        """Queue new events by endpoint, then push to every frontend what waits for it."""
        for endpoint, new in events.items():
            self.prepare(endpoint)
            if (frontend := self._frontends.get(endpoint)) is None:
                self.dropped_tokens += len(new)
            else:
                frontend.outbox.add(new)
        self.flush()

    def flush(self) -> bool:
        """Push what waits; True if nothing waits any more. Frontends that are gone or unused are let go."""
        now = time.monotonic()
        clear = True
        for endpoint, frontend in list(self._frontends.items()):
            if frontend.push(now):
                if now - frontend.last_used > self._frontend_seconds:
                    self._frontends.pop(endpoint).socket.close()
            else:
                clear = self._give_up(endpoint, frontend, now) and clear
        return clear

    def _give_up(self, endpoint: str, frontend: Frontend, now: float) -> bool:
        """Drop what waits for a frontend that takes nothing, if it is time; True if so."""
        waited = now - (frontend.refused_since or now)
        too_many = frontend.outbox.num_tokens > self._max_unsent_tokens
        if waited <= self._frontend_seconds and not too_many:
            return False
        self.dropped_tokens += frontend.outbox.num_tokens
        log.warning(
            "frontend gone endpoint=%s waited_s=%.1f dropped_tokens=%d",
            endpoint,
            waited,
            frontend.outbox.num_tokens,
        )
        frontend.socket.close(linger=0)
        del self._frontends[endpoint]
        return True

    def blocked_sockets(self) -> "list[zmq.Socket[bytes]]":
        """Sockets for which something waits: poll them for POLLOUT."""
        return [frontend.socket for frontend in self._frontends.values() if frontend.outbox]

    def close(self) -> None:
        """Close all; returns when what the sockets hold is delivered, after LINGER at most."""
        for frontend in self._frontends.values():
            frontend.socket.close()
        self._frontends.clear()
        self._context.term()
