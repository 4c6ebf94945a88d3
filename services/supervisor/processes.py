"""Runs child processes as `supervision` decides: here are clock, signals, processes and output.

Every child is a session of its own, so that Ctrl-C reaches only the supervisor, and the kernel kills it if
the supervisor dies.
"""

import asyncio
import collections
import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.supervisor.heartbeats import Heartbeats
from services.supervisor.supervision import Action, Child, Finish, Policy, Send, Start, Supervision, Tell

KEPT_LINES = 20  # of a child's output, shown again when the supervisor gives up
LOOK_SECONDS = 0.5  # between two looks at who gets on
OUTPUT_WAIT = 1.0  # seconds for a dead child's last lines
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Command:
    """How to start a child. `first` is added to `environ` at the first start only.

    `lock`: the file that it touches as it gets on; `{pid}` in its name stands for its process id.
    """

    child: Child
    argv: Sequence[str]
    environ: Mapping[str, str]
    first: Mapping[str, str]
    lock: str = ""


def say(name: str, text: str) -> None:
    """One line on the terminal. A terminal that went away does not stop the service."""
    with contextlib.suppress(OSError):
        print(f"{name:<10} | {text}", flush=True)


class Supervisor:
    """Runs `commands` until a stop; `tell(name, line)` gets all output, the children's and its own."""

    def __init__(
        self,
        commands: Sequence[Command],
        policy: Policy | None = None,
        tell: Callable[[str, str], None] = say,
        stuck_seconds: float = 0.0,
    ) -> None:
        self._commands = {command.child.name: command for command in commands}
        self._supervision = Supervision([command.child for command in commands], policy or Policy())
        self._tell = tell
        self._stuck_seconds = stuck_seconds
        self._heartbeats = Heartbeats(math.ceil(stuck_seconds / LOOK_SECONDS))
        self._next_look = 0.0
        self._pids: dict[str, int] = {}
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._status: int | None = None
        self._error: BaseException | None = None
        self._last_lines = {name: collections.deque[str](maxlen=KEPT_LINES) for name in self._commands}

    async def run(self) -> int:
        """Until all children are gone; returns the exit status. SIGTERM, SIGINT and SIGHUP stop it."""
        loop = asyncio.get_running_loop()
        former = {
            number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(self.stop))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            self._act(self._supervision.begin(time.monotonic()))
            while self._status is None:
                await self._sleep()
                if self._error is not None:
                    raise self._error
                self._act(self._supervision.tick(time.monotonic()))
                self._look(time.monotonic())
        finally:
            for name in list(self._pids):
                self._signal(name, signal.SIGKILL)
            for number, handler in former.items():
                signal.signal(number, handler)
        return self._status

    def stop(self, status: int = 0) -> None:
        """As Ctrl-C: the first time drain, the second time at once. `status` is what `run` shall return."""
        again = self._supervision.stopping
        self._tell("supervisor", "stopping at once" if again else "stopping; once more stops at once")
        self._act(self._supervision.stop(time.monotonic(), status))

    @property
    def stopping(self) -> bool:
        return self._supervision.stopping

    async def _sleep(self) -> None:
        """Until the next deadline of the supervision or the next look, or until something happened."""
        deadline = self._supervision.deadline
        timeout = (
            LOOK_SECONDS if deadline is None else min(max(0.0, deadline - time.monotonic()), LOOK_SECONDS)
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)
        self._wake.clear()

    def _look(self, now: float) -> None:
        """Who is stuck?"""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for name, pid in list(self._pids.items()):
            lock = self._commands[name].lock.format(pid=pid)
            if lock and self._heartbeats.stuck(name, pid, Path(lock)):
                self._act(self._supervision.stuck(name, self._stuck_seconds))

    def _act(self, actions: Sequence[Action]) -> None:
        if actions:
            self._wake.set()
        for action in actions:
            match action:
                case Start(name):
                    self._spawn(self._life(self._commands[name]))
                case Send(name, number):
                    self._signal(name, number)
                case Tell(name, text):
                    self._tell(name, text)
                case Finish(status, failed):
                    self._status = status
                    self._show_failure(failed)

    def _spawn(self, life: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._wake.set()

    def _signal(self, name: str, number: signal.Signals) -> None:
        """SIGKILL goes to all that the child started, too."""
        pid = self._pids.get(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _show_failure(self, failed: str) -> None:
        if failed:
            self._tell("supervisor", f"stopped, because {failed} failed. Its last lines:")
            for line in self._last_lines[failed]:
                self._tell(failed, line)

    async def _life(self, command: Command) -> None:
        """One process of a child, from its start to its end."""
        name = command.child.name
        try:
            code = await self._run_process(command)
        except OSError as error:
            self._line(name, f"cannot be started: {error}")
            code = 127
        self._pids.pop(name, None)
        self._act(self._supervision.exited(name, code, time.monotonic()))

    async def _run_process(self, command: Command) -> int:
        name = command.child.name
        environ = {**command.environ, **({} if name in self._started else command.first)}
        self._started.add(name)
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        self._pids[name] = process.pid
        if self._supervision.stopping:
            self._signal(name, signal.SIGTERM)  # the stop came while it was being started
        assert process.stdout is not None
        output = asyncio.create_task(self._pass_on(name, process.stdout))
        code = await process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(output, OUTPUT_WAIT)
        return code

    async def _pass_on(self, name: str, stream: asyncio.StreamReader) -> None:
        """Hand every line on; one that is too long for the reader's buffer comes in pieces."""
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(name, line.decode(errors="replace").rstrip())
        if rest:
            self._line(name, rest.decode(errors="replace"))

    def _line(self, name: str, line: str) -> None:
        self._last_lines[name].append(line)
        self._tell(name, line)


def _die_with(parent: int) -> Callable[[], None]:
    """To be called in a new child: the kernel kills it when its parent dies, even by SIGKILL."""

    def arrange() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange
