"""The runner's loop: one thread between manager, scheduler, engine and frontends.

It never waits while a sequence can compute. When none can, it polls its sockets, for IDLE_WAIT at most, so
that the manager keeps hearing from it.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Final

import zmq

from gpu_runner.config import RunnerConfig
from gpu_runner.engine import Engine
from gpu_runner.scheduler import Limits, Scheduler
from gpu_runner.token_sender import TokenSender
from kvmanager.client import ManagerClient
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Directives,
    Draining,
    Fenced,
    Holdings,
    Ready,
    Refused,
    RunnerHello,
    Welcome,
)

log = logging.getLogger(__name__)

IDLE_WAIT: Final = 0.1  # seconds
REASSERT_INTERVAL: Final = 1.0  # seconds after which a manager that has not answered is told again
HELLO_WAIT: Final = 2.0  # seconds between looks at whether to stop, while the manager does not answer
LAST_PUSH_WAIT: Final = 2.0  # seconds that frontends get at the end to take what waits for them


class Server:
    """One runner under successive sessions with the manager. `run` serves until `drain`."""

    def __init__(self, config: RunnerConfig, engine: Engine) -> None:
        """Takes the lock of `config.full_name`. Raises PagekeeperError if another process holds it."""
        self._config = config
        self._engine = engine
        hello = RunnerHello(
            PROTOCOL_VERSION,
            config.full_name,
            config.full_name,
            engine.layout,
            config.max_num_seqs,
            engine.max_model_len,
            engine.shared_pool,
        )
        self._client = ManagerClient(config.manager, hello, config.pool_directory)
        self._sender = TokenSender(config.frontend_seconds, config.max_unsent_tokens)
        self._limits = Limits(
            engine.layout.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            engine.max_model_len,
            engine.vocab_size,
        )
        engine.show_progress(self._client.show_life)
        self._scheduler = self._new_scheduler()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fenced = False
        self._boot_id = ""  # of the manager whose session it was, or is
        self._held: Holdings | None = None  # what a manager that has restarted is told; None: none is
        self._absent_at = 0.0  # seconds; when it has to have answered
        self._reassert_at = 0.0  # when it is told again
        self._ready = False  # it has warmed up
        self._draining = False
        self._drain_by = 0.0  # seconds; how long it then waits for a manager that is away
        self._drain_until: float | None = None  # once the manager was told
        self._dismissed = False  # by the manager: it has all back

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, self._engine.eos_token_ids)

    def drain(self) -> None:
        """Hand over what runs, within `drain_seconds`, then let `run` return. From any thread or signal."""
        if not self._draining:
            self._drain_by = time.monotonic() + self._config.drain_seconds
        self._draining = True
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # it is awake already

    def run(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Serve, and call `at_end` before closing, from when on there is nothing to drain. Raises
        PagekeeperError if the manager refuses this runner or stays away.
        """
        try:
            self._begin_session(first=True)
            while not self._drained():
                self._step()
        finally:
            at_end()
            self._close()

    # --- sessions -------------------------------------------------------------------------------------------

    def _begin_session(self, first: bool = False) -> None:
        """Say Hello until there is a session; what ran under an earlier one is forgotten."""
        welcome = self._connect()
        if welcome is None:
            return
        self._enter(welcome)
        if first:
            self._warm_up()
        if not self._fenced:
            self._client.send(Ready())

    def _enter(self, welcome: Welcome) -> None:
        """Begin with nothing under a new session."""
        self._fenced = False
        self._boot_id = welcome.session.boot_id
        self._scheduler = self._new_scheduler()
        self._drain_until = None
        self._engine.attach(welcome.pool_directory, welcome.num_blocks)
        log.info("session began %s", _pairs(session=welcome.session.incarnation, blocks=welcome.num_blocks))

    def _go_on(self, boot_id: str) -> None:
        """The manager has restarted: tell it what runs here, and go on with the credits in hand."""
        self._held = self._scheduler.holdings()
        self._absent_at = time.monotonic() + self._config.connect_seconds
        self._reassert_at = 0.0
        log.warning("the manager has restarted %s", _pairs(boot_id=boot_id, running=self._running))
        self._reassert()

    def _reassert(self) -> None:
        now = time.monotonic()
        if now >= self._absent_at and not self._draining:
            raise self._absent()
        if self._held is not None and now >= self._reassert_at:
            self._reassert_at = now + REASSERT_INTERVAL
            self._client.reassert(self._held)

    def _taken_over(self, welcome: Welcome) -> None:
        """The manager has read what ran here, and keeps some or all of it."""
        self._held = self._drain_until = None
        before, late = self._running, []
        if welcome.kept:
            self._boot_id = welcome.session.boot_id
            late = self._scheduler.keep_only(welcome.kept)
            log.info("session goes on %s", _pairs(session=welcome.session.incarnation, running=self._running))
        else:
            self._enter(welcome)
        if before > self._running:
            log.warning(
                "dropped, as the manager does not know it %s", _pairs(sequences=before - self._running)
            )
        for message in (Ready(), *late):
            self._client.send(message)

    def _connect(self) -> Welcome | None:
        """A new session, or None when this runner is to stop before there is one."""
        deadline = time.monotonic() + self._config.connect_seconds
        while not self._draining:
            if self._ready:  # before that, nobody can say how long things may take
                self._client.show_life()
            left = deadline - time.monotonic()
            try:
                return self._client.connect(min(max(left, 0.0), HELLO_WAIT))
            except PagekeeperError as error:
                if error.code != "manager_absent":
                    raise
                if left <= HELLO_WAIT:
                    raise self._absent() from None
        return None

    def _absent(self) -> PagekeeperError:
        where = self._config.manager or f"pool directory {self._config.pool_directory}"
        return PagekeeperError(
            "manager_absent",
            f"no KV manager answered at {where} within connect_seconds={self._config.connect_seconds:g}: "
            "start one there, or name the right one with --manager or --pool-directory",
        )

    def _warm_up(self) -> None:
        began = time.monotonic()

        def progress(text: str) -> None:
            log.info("warming up %s", text)
            self._receive()

        self._engine.warm_up(progress)
        self._ready = True
        log.info("ready %s", _pairs(warm_up_s=round(time.monotonic() - began, 2)))

    # --- the loop -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._client.show_life()
        self._receive()
        if self._fenced:
            self._begin_session()
            return
        if self._held is not None:
            self._reassert()
        elif self._draining and self._drain_until is None:
            self._begin_drain()
        plan = None if self._draining else self._scheduler.schedule()
        if (report := self._scheduler.report()) is not None:
            self._client.send(report)
        if plan is None:
            self._sender.flush()
            if not self._drained():
                self._wait(IDLE_WAIT)
            return
        self._sender.send(self._scheduler.update(plan, self._engine.execute(plan)))

    def _receive(self) -> None:
        for message in self._client.receive():
            if isinstance(message, Fenced):
                if message.boot_id != self._boot_id and self._running:
                    self._go_on(message.boot_id)
                    continue
                log.warning(
                    "fenced by the manager %s", _pairs(boot_id=message.boot_id, dropped=self._running)
                )
                self._fenced = True
            elif isinstance(message, Welcome):
                self._taken_over(message)
            elif isinstance(message, Refused):
                raise PagekeeperError(message.code, message.message)
            elif isinstance(message, Directives):
                for start in message.starts:
                    self._sender.prepare(start.token_endpoint)
                if refused := self._scheduler.handle(message):
                    self._sender.send(refused)
                self._dismissed |= message.dismissed

    @property
    def _running(self) -> int:
        return self._scheduler.statistics().sequences

    def _wait(self, seconds: float) -> None:
        """Until a message comes, a frontend takes tokens again, or `drain` is called; `seconds` at most."""
        poller = zmq.Poller()
        poller.register(self._client.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        for socket in self._sender.blocked_sockets():
            poller.register(socket, zmq.POLLOUT)
        ready = dict(poller.poll(int(seconds * 1000)))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)

    # --- the end --------------------------------------------------------------------------------------------

    def _begin_drain(self) -> None:
        """Nothing is computed from here on. Tokens leave first: those of the next runner follow them."""
        self._drain_until = time.monotonic() + self._config.drain_seconds
        self._push_out()
        self._client.send(Draining())
        log.info("draining %s", _pairs(running=self._running, drain_seconds=self._config.drain_seconds))

    def _drained(self) -> bool:
        """True once this runner may stop: the manager has all back, or the time for it is over, or it has no
        session.
        """
        if not self._draining:
            return False
        if self._held is not None:  # soon there may be a manager to hand it to
            return time.monotonic() >= self._drain_by
        if self._client.session is None or self._dismissed:
            return True
        return self._drain_until is not None and time.monotonic() >= self._drain_until

    def _push_out(self) -> None:
        """Give frontends the tokens that wait for them, for LAST_PUSH_WAIT at most."""
        until = time.monotonic() + LAST_PUSH_WAIT
        while not self._sender.flush() and (left := until - time.monotonic()) > 0:
            self._wait(min(left, IDLE_WAIT))

    def _close(self) -> None:
        self._push_out()
        log.info("ended %s", _pairs(left_running=self._running, steps=self._scheduler.statistics().steps))
        self._sender.close()
        self._client.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _pairs(**values: object) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
