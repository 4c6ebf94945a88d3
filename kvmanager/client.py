"""How a frontend (asyncio) or a runner (plain loop) talks with the KV manager.

The rules of a session (frames, fencing, probes) are in `ClientSession`, which has no sockets; the two
clients are thin shells around it. A probe is a message with an empty body, sent when nothing else was for
`PROBE_INTERVAL`: it shows that this process makes progress, and a manager that has restarted answers it with
`Fenced`.
"""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import zmq
import zmq.asyncio

from kvmanager.errors import PagekeeperError
from kvmanager.liveness import HeldLock
from kvmanager.paths import (
    check_socket,
    default_pool_directory,
    leftovers,
    lock_path,
    manager_endpoint,
    named,
    prepare,
    socket_endpoint,
)
from kvmanager.protocol import (
    MAX_FRAME_BYTES,
    Directives,
    Fenced,
    FrontendHello,
    Hello,
    Holdings,
    ManagerToFrontend,
    ManagerToRunner,
    Refused,
    RunnerHello,
    Session,
    Welcome,
    decode_to_frontend,
    decode_to_runner,
    encode,
)
from kvmanager.stop_signals import ignore_stops, on_stop, run_process

__all__ = [
    "AsyncManagerClient",
    "ClientSession",
    "ManagerClient",
    "check_socket",
    "default_pool_directory",
    "ignore_stops",
    "leftovers",
    "manager_endpoint",
    "named",
    "on_stop",
    "prepare",
    "run_process",
    "socket_endpoint",
]

PROBE_INTERVAL: Final = 0.1  # seconds; also how soon a new manager is noticed
HELLO_INTERVAL: Final = 1.0  # seconds after which an unanswered Hello is sent again
HIGH_WATER_MARK: Final = 1000  # messages, each direction
MAX_BATCH: Final = 256  # messages handed out by one receive()

Received = ManagerToFrontend | ManagerToRunner


class ClientSession:
    """The rules of one client's sessions, without I/O: which frames to send, what those that came mean."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.session: Session | None = None
        self._frame = b""  # the session as it is on the wire; empty while there is none
        self._last_sent = 0.0
        self._decode = decode_to_frontend if isinstance(hello, FrontendHello) else decode_to_runner
        self._hello_body = encode(hello)

    def hello_frames(self, now: float, holdings: Holdings | None = None) -> list[bytes]:
        """Start over: what was known of an earlier session is forgotten. A runner may have holdings."""
        self._end()
        self._last_sent = now
        if holdings is None:
            return [b"", self._hello_body]
        assert isinstance(self.hello, RunnerHello)
        return [b"", encode(msgspec.structs.replace(self.hello, holdings=holdings))]

    def frames(self, now: float, message: Any) -> list[bytes]:
        """`message` under the current session. Raises PagekeeperError ("manager_absent") if there is none."""
        if not self._frame:
            raise PagekeeperError(
                "manager_absent", "no session with the KV manager: connect first", retry_after=1.0
            )
        self._last_sent = now
        return [self._frame, encode(message)]

    def probe(self, now: float) -> list[bytes] | None:
        """A probe's frames if one is due at `now` (seconds), else None."""
        if not self._frame or now - self._last_sent < PROBE_INTERVAL:
            return None
        self._last_sent = now
        return [self._frame, b""]

    def received(self, frames: list[bytes]) -> Received | None:
        """The message in `frames`, or None for one of another session (or one that cannot be read)."""
        if len(frames) != 2 or len(frames[1]) > MAX_FRAME_BYTES or (frames[0] and frames[0] != self._frame):
            return None
        try:
            message: Received = self._decode(frames[1])
        except (msgspec.DecodeError, RecursionError):
            return None
        if isinstance(message, Welcome | Refused):
            return self._answered(message)
        if not frames[0]:
            return None
        if isinstance(message, Fenced):
            self._end()
        return message

    def _answered(self, answer: Welcome | Refused) -> Welcome | Refused | None:
        """The answer to a Hello; a second answer to a Hello that was sent twice is dropped."""
        if self._frame:
            return None
        if isinstance(answer, Welcome):
            self.session = answer.session
            self._frame = encode(answer.session)
        return answer

    def _end(self) -> None:
        self.session = None
        self._frame = b""


def _configure(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)


def _absent(endpoint: str, timeout_s: float) -> PagekeeperError:
    return PagekeeperError(
        "manager_absent",
        f"the KV manager at {endpoint} did not answer a Hello within {timeout_s:g} s",
        retry_after=1.0,
    )


def _full(endpoint: str) -> PagekeeperError:
    return PagekeeperError(
        "manager_absent",
        f"{HIGH_WATER_MARK} messages wait for the KV manager at {endpoint}: it is away",
        retry_after=1.0,
    )


def _checked(answer: Welcome | Refused) -> Welcome:
    if isinstance(answer, Refused):
        raise PagekeeperError(answer.code, answer.message)
    return answer


class _Client:
    """What both clients share: the lock, the endpoint and the session."""

    def __init__(self, endpoint: str, hello: Hello, pool_directory: str) -> None:
        self._endpoint = endpoint or manager_endpoint(pool_directory)
        self._session = ClientSession(hello)
        prepare(pool_directory)
        self._lock = HeldLock(lock_path(pool_directory, hello.lock))
        self._next_touch = 0.0

    def _touch_lock(self, now: float) -> None:
        if now >= self._next_touch:
            self._next_touch = now + PROBE_INTERVAL
            self._lock.touch()

    @property
    def session(self) -> Session | None:
        """The session in force, or None before `connect` and after `Fenced`."""
        return self._session.session


class ManagerClient(_Client):
    """A runner's connection to the manager (blocking only in `connect`). Use from one thread.

    `endpoint` may be empty for the pool directory's own. The lock file `locks/<hello.lock>` is held from
    here to `close`. Raises PagekeeperError if it cannot be.
    """

    def __init__(self, endpoint: str, hello: Hello, pool_directory: str) -> None:
        super().__init__(endpoint, hello, pool_directory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        """Poll it for POLLIN; it stays the same over reconnects."""
        _configure(self.socket)
        self.socket.connect(self._endpoint)

    def connect(self, timeout_s: float) -> Welcome:
        """Say Hello, wait for the Welcome. Raises PagekeeperError: a refusal's code, "manager_absent", or
        "internal" if another process may have this one's name.
        """
        self._lock.check()
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            self._send(self._session.hello_frames(now))
            answer = self._await_answer(min(deadline, now + HELLO_INTERVAL))
            if answer is not None:
                return _checked(answer)
        raise _absent(self._endpoint, timeout_s)

    def _await_answer(self, until: float) -> Welcome | Refused | None:
        while (left := until - time.monotonic()) > 0:
            if self.socket.poll(int(left * 1000) + 1):
                message = self._session.received(self.socket.recv_multipart(zmq.DONTWAIT))
                if isinstance(message, Welcome | Refused):
                    return message
        return None

    def show_life(self) -> None:
        """To be called as the work goes on, however often: now and then it touches the lock file, for the
        supervisor, and probes, for the manager.
        """
        self._touch_lock(time.monotonic())
        self._probe()

    def _probe(self) -> None:
        """Without room for it there is none: it would come after all that waits."""
        if (probe := self._session.probe(time.monotonic())) is not None:
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart(probe, zmq.DONTWAIT)

    def send(self, message: Any) -> None:
        """Queue `message`, never wait. Raises PagekeeperError ("manager_absent") without session or room."""
        self._send(self._session.frames(time.monotonic(), message))

    def reassert(self, holdings: Holdings) -> None:
        """Say Hello and do not wait: the Welcome, or a Refused, is among what `receive` hands out later. To
        be called again while none has come, as either may have been lost. Raises PagekeeperError ("internal")
        if another process may have this one's name.
        """
        self._lock.check()
        self._send(self._session.hello_frames(time.monotonic(), holdings))

    def receive(self) -> list[Directives | Fenced | Welcome | Refused]:
        """What has come, without waiting. After a `Fenced` nothing comes until `connect` or `reassert`.

        Call it at least a few times per second: it also sends the probe that shows that this process lives.
        """
        messages: list[Any] = []
        while len(messages) < MAX_BATCH:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            message = self._session.received(frames)
            if message is not None:
                messages.append(message)
        self._probe()
        return messages

    def _send(self, frames: list[bytes]) -> None:
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise _full(self._endpoint) from None

    def close(self) -> None:
        """Give up the session: the manager takes back what this process held. Safe to call twice."""
        self.socket.close()
        self._context.term()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncManagerClient(_Client):
    """A frontend's connection to the manager, on asyncio. Everything as in `ManagerClient`, but awaited."""

    def __init__(self, endpoint: str, hello: Hello, pool_directory: str) -> None:
        super().__init__(endpoint, hello, pool_directory)
        self._context = zmq.asyncio.Context()
        self.socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.connect(self._endpoint)

    async def connect(self, timeout_s: float) -> Welcome:
        """Say Hello, wait for the Welcome. Raises PagekeeperError: a refusal's code, "manager_absent", or
        "internal" if another process may have this one's name.
        """
        self._lock.check()
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            await self._send(self._session.hello_frames(now))
            answer = await self._await_answer(min(deadline, now + HELLO_INTERVAL))
            if answer is not None:
                return _checked(answer)
        raise _absent(self._endpoint, timeout_s)

    async def _await_answer(self, until: float) -> Welcome | Refused | None:
        while (left := until - time.monotonic()) > 0:
            if await self.socket.poll(int(left * 1000) + 1):
                message = self._session.received(await self.socket.recv_multipart(zmq.DONTWAIT))
                if isinstance(message, Welcome | Refused):
                    return message
        return None

    def show_life(self) -> None:
        """To be called as the process's loop turns, however often: it touches the lock file now and then."""
        self._touch_lock(time.monotonic())

    async def send(self, message: Any) -> None:
        """Queue `message`, never wait. Raises PagekeeperError ("manager_absent") without session or room."""
        await self._send(self._session.frames(time.monotonic(), message))

    async def receive(self) -> list[ManagerToFrontend]:
        """What has come; waits at most `PROBE_INTERVAL`, so call it in a loop: it also sends the probes.

        After a `Fenced` nothing comes until `connect` is called again.
        """
        messages: list[Any] = []
        ready = await self.socket.poll(int(PROBE_INTERVAL * 1000))
        while ready and len(messages) < MAX_BATCH:
            message = self._session.received(await self.socket.recv_multipart(zmq.DONTWAIT))
            if message is not None:
                messages.append(message)
            ready = await self.socket.poll(0)
        if (probe := self._session.probe(time.monotonic())) is not None:
            await self._send(probe)
        if not messages:
            await asyncio.sleep(0)  # a caller's loop stays cancellable even if polling never suspends
        return messages

    async def _send(self, frames: list[bytes]) -> None:
        try:
            await self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise _full(self._endpoint) from None

    def close(self) -> None:
        """Give up the session: the manager takes back what this process held. Safe to call twice."""
        self.socket.close()
        self._context.term()
        self._lock.release()
