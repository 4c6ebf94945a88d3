"""A manager and a runner in one object, on real sockets, speaking the real protocol; and real frontends
before it.

The model is `script`: prompt → the token ids that each choice gets, one per event. What it does not say
ends with the end-of-text token. Tests can hold the tokens back, lose the runner, restart the manager, or
make it deaf.
"""

import asyncio
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import zmq
import zmq.asyncio

from kvmanager.client import manager_endpoint, prepare
from kvmanager.protocol import (
    Accepted,
    BeamScore,
    Cancel,
    Clear,
    Evict,
    Fenced,
    FrontendHello,
    NotHeld,
    Pin,
    PinsAnswer,
    PinsQuery,
    PoolStats,
    Question,
    Rejected,
    RunnerLost,
    RunnerStats,
    Session,
    Stats,
    StatsQuery,
    Submit,
    TokenBatch,
    TokenEvent,
    TokenLogprobs,
    Unpin,
    Welcome,
    decode_to_manager,
    encode,
)
from services.app import load_model, make_app
from services.config import FrontendConfig
from services.context import ServedModel
from services.http_protocol import bounded_head
from services.text.model_source import resolve
from tests.services.fake_cache import FakeCache

Script = Callable[[Submit, int], list[int]]

WAIT_SECONDS = 20.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll until `condition` holds; AssertionError that names `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        pause.wait(0.005)


class FakeManager:
    """Answers frontends and produces tokens. All attributes may be set from the test's thread."""

    def __init__(self, pool_directory: str, eos: int) -> None:
        self.script: Script = lambda submit, choice: []
        self.flow = asyncio.Event()  # cleared: no tokens come
        self.flow.set()
        self.deaf = False
        self.reject: Callable[[Submit], Rejected | None] = lambda submit: None
        self.ready = True
        self.silence = 0.0  # seconds since the runner was last heard of
        self.pins: Callable[[Pin | Unpin | PinsQuery], PinsAnswer] = lambda message: PinsAnswer(
            message.query_id, (), 0, 25
        )
        self.pin_messages: list[Pin | Unpin | PinsQuery] = []
        self.cache = FakeCache()
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.hold_at: int | None = None  # position at which a first attempt clears `flow`
        self.hold_attempts = 1  # how many attempts do
        self.finished = 0  # requests whose tokens were all sent
        self.cached_tokens = 0
        self.tokens_per_event = 1
        self._eos = eos
        self._boot = 0
        self._endpoints: dict[bytes, str] = {}  # identity → token endpoint
        self._sessions: dict[bytes, bytes] = {}  # identity → session frame
        self._runs: dict[tuple[bytes, str], tuple[int, asyncio.Task[None]]] = {}
        self._pushes: dict[str, zmq.asyncio.Socket] = {}
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(manager_endpoint(pool_directory))

    async def run(self) -> None:
        while True:
            identity, session, body = await self._router.recv_multipart()
            if not self.deaf:
                await self._receive(identity, session, body)

    async def close(self) -> None:
        for _, task in self._runs.values():
            task.cancel()
        for push in self._pushes.values():
            push.close()
        self._router.close()
        self._context.term()

    @property
    def running(self) -> int:
        return sum(not task.done() for _, task in self._runs.values())

    # --- what tests do to it (in the loop) ----------------------------------------------------------------

    async def lose_runner(self) -> None:
        """The runner dies: its requests stop, their frontends are told."""
        for (identity, request_id), (attempt, task) in list(self._runs.items()):
            if not task.done():
                task.cancel()
                await self._send(identity, RunnerLost(((request_id, attempt),)))

    async def restart(self) -> None:
        """A new boot that knows nobody."""
        self._boot += 1
        self._sessions.clear()
        for _, task in self._runs.values():
            task.cancel()
        self._runs.clear()

    # --- the protocol -------------------------------------------------------------------------------------

    async def _receive(self, identity: bytes, session: bytes, body: bytes) -> None:
        message = decode_to_manager(body) if body else None
        if isinstance(message, FrontendHello):
            self._endpoints[identity] = message.token_endpoint
            registered = Session(f"boot-{self._boot}", len(self._endpoints), 1)
            self._sessions[identity] = encode(registered)
            await self._router.send_multipart([identity, b"", encode(Welcome(registered, "", 0))])
        elif self._sessions.get(identity) != session:
            await self._router.send_multipart([identity, session, encode(Fenced(f"boot-{self._boot}"))])
        elif isinstance(message, Submit) and message.claim:
            await self._send(identity, NotHeld(((message.request_id, message.attempt),)))
        elif isinstance(message, Submit):
            await self._submitted(identity, message)
        elif isinstance(message, Cancel):
            self.cancels.append(message)
            attempt, task = self._runs.get((identity, message.request_id), (-1, None))
            if task is not None and attempt == message.attempt:
                task.cancel()
        elif isinstance(message, StatsQuery):
            await self._send(identity, self.stats(message.query_id))
        elif isinstance(message, Pin | Unpin | PinsQuery):
            self.pin_messages.append(message)
            await self._send(identity, self.pins(message))
        elif isinstance(message, Question | Evict | Clear):
            await self._send(identity, self.cache.answer(message))

    async def _submitted(self, identity: bytes, submit: Submit) -> None:
        self.submits.append(submit)
        if (rejected := self.reject(submit)) is not None:
            await self._send(identity, rejected)
            return
        await self._send(identity, Accepted(submit.request_id, submit.attempt))
        task = asyncio.create_task(self._generate(identity, submit))
        self._runs[identity, submit.request_id] = (submit.attempt, task)

    async def _send(self, identity: bytes, message: Any) -> None:
        if identity in self._sessions:
            await self._router.send_multipart([identity, self._sessions[identity], encode(message)])

    def stats(self, query_id: int) -> Stats:
        runner = RunnerStats("runner-0", 9, self.ready, False, self.running, 2, self.silence)
        pool = PoolStats(100, 16, free=60, reserved=10, sealed=20, cached=9, quarantined=1)
        return Stats(
            query_id,
            pool,
            (runner,),
            3,
            self.running,
            1000,
            400,
            5,
            6,
            7,
            0,
            used_tokens=360,
            at=self.cache.at,
        )

    # --- the model ----------------------------------------------------------------------------------------

    async def _generate(self, identity: bytes, submit: Submit) -> None:
        outputs = {choice.index: self._plan(submit, choice.index) for choice in submit.choices}
        at = {choice.index: len(choice.output_token_ids) for choice in submit.choices}
        while any(at[index] < len(outputs[index]) for index in outputs):
            await self.flow.wait()
            events = []
            for index, plan in outputs.items():
                if at[index] < len(plan):
                    whole = submit.sampling.beam is not None
                    end = len(plan) if whole else min(at[index] + self.tokens_per_event, len(plan))
                    events.append(
                        self._event(submit, index, at[index], plan[at[index] : end], end == len(plan))
                    )
                    at[index] = end
            await self.push(self._endpoints[identity], TokenBatch(tuple(events)))
            holds = submit.attempt < self.hold_attempts and self.hold_at is not None
            if holds and max(at.values()) >= self.hold_at:
                self.flow.clear()
            await asyncio.sleep(0)
        self.finished += 1

    def _plan(self, submit: Submit, choice: int) -> list[int]:
        plan = [*self.script(submit, choice)]
        if not submit.sampling.ignore_eos:
            plan.append(self._eos)
        return plan[: submit.sampling.max_tokens]

    def _event(self, submit: Submit, choice: int, position: int, ids: list[int], last: bool) -> TokenEvent:
        reason = None
        if last:
            ends = {*submit.sampling.stop_token_ids, *(() if submit.sampling.ignore_eos else (self._eos,))}
            reason = "stop" if ids[-1] in ends else "length"
        stop_ids = submit.sampling.stop_token_ids
        return TokenEvent(
            submit.request_id,
            submit.attempt,
            choice,
            position,
            tuple(ids),
            self.cached_tokens,
            logprobs=self._logprobs(submit.sampling.logprobs, ids, choice),
            prompt_logprobs=self._prompt_logprobs(submit) if position == 0 else None,
            finish_reason=reason,  # type: ignore[arg-type]
            stop_reason=ids[-1] if reason == "stop" and ids[-1] in stop_ids else None,
            beam=BeamScore(-1.0 - choice, -0.5 - choice) if submit.sampling.beam else None,
        )

    def _logprobs(self, top: int | None, ids: list[int], choice: int) -> tuple[TokenLogprobs, ...] | None:
        """Choice c has a mean of -1/(c+1): the last one is the best."""
        if top is None:
            return None
        value = -1.0 / (choice + 1)
        return tuple(
            TokenLogprobs(value, 1, tuple((token + k, value - k) for k in range(top))) for token in ids
        )

    def _prompt_logprobs(self, submit: Submit) -> tuple[TokenLogprobs | None, ...] | None:
        top = submit.sampling.prompt_logprobs
        if top is None:
            return None
        rest = self._logprobs(top, list(submit.prompt_token_ids[1:]), 0)
        assert rest is not None
        return (None, *rest)

    async def push(self, endpoint: str, batch: TokenBatch) -> None:
        if endpoint not in self._pushes:
            self._pushes[endpoint] = self._context.socket(zmq.PUSH)
            self._pushes[endpoint].setsockopt(zmq.LINGER, 0)
            self._pushes[endpoint].connect(endpoint)
        await self._pushes[endpoint].send(encode(batch))


class Stack:
    """Real frontends (uvicorn, one port each) and a FakeManager, in one thread of their own; a context
    manager.
    """

    def __init__(
        self, frontends: int = 1, manager: bool = True, send_buffer: int = 0, **settings: Any
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm")
        self.pool_directory = str(Path(self._temporary.name) / "pool")
        prepare(self.pool_directory)
        self._with_manager = manager
        self._settings = {"manager_timeout_seconds": 10.0, **settings}
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(frontends)]
        for listener in self._sockets if send_buffer else ():
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer
            )  # bytes; connections inherit it
        self.urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in self._sockets]
        self.url = self.urls[0] if self.urls else ""
        self.fatal: list[Exception] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> "Stack":
        self._thread.start()
        assert self._started.wait(WAIT_SECONDS)
        if self._with_manager:
            wait_until(lambda: len(self.manager._sessions) == len(self.urls), "the frontends' Hellos")
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the stack did not stop"
        found = [path for path in Path(self.pool_directory).rglob("*") if not path.is_dir()]
        left = [path for path in found if path.name != "manager.sock" and path.parent.name != "streams"]
        self._temporary.cleanup()
        assert left == [], f"left behind: {left}"

    def do(self, action: Callable[[], Any]) -> Any:
        """Run a coroutine function (or a function) in the stack's loop; returns its result."""

        async def run() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_SECONDS)

    def hold(self) -> None:
        self.do(self.manager.flow.clear)

    def go_on(self) -> None:
        self.do(self.manager.flow.set)

    def start_manager(self) -> None:
        self.do(self._start_manager)

    async def _start_manager(self) -> None:
        self.manager = FakeManager(self.pool_directory, self.model.eos_token_ids[0])
        self._manager_task = asyncio.create_task(self.manager.run())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.model = served_model()
        if self._with_manager:
            await self._start_manager()
        servers, tasks = [], []
        for number, listener in enumerate(self._sockets):
            config = FrontendConfig(pool_directory=self.pool_directory, **self._settings)
            app = make_app(config, self.model, f"frontend-{number}", self.fatal.append)
            self.app = app  # of the last one
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    http=bounded_head(config.client_timeout_seconds),
                    log_config=None,
                    timeout_graceful_shutdown=1,
                )
            )
            servers.append(server)
            tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        while not all(server.started for server in servers):
            await asyncio.sleep(0.005)
        self._started.set()
        await self._stop.wait()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        if hasattr(self, "manager"):
            self._manager_task.cancel()
            await self.manager.close()


_models: list[ServedModel] = []


def served_model() -> ServedModel:
    """The packaged model's tokenizer and template, loaded once."""
    if not _models:
        _models.append(load_model(FrontendConfig(model=str(resolve("")))))
    return _models[0]


def says(*texts: str) -> Script:
    """A script: choice i gets the tokens of texts[i] (the last one for all further choices)."""
    encode_text = served_model().tokenizer.encode
    plans = [encode_text(text, add_special_tokens=False) for text in texts]
    return lambda submit, choice: plans[min(choice, len(plans) - 1)]


def events(lines: Any) -> list[Any]:
    """The data of server-sent events, after checking that [DONE] ends them."""
    data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]
