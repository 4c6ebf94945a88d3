"""What the supervisor decides, without processes or clocks: when to start, restart, signal and give up.

Events go in (`begin`, `exited`, `tick`, `stop`), actions come out; times are seconds of any steady clock.
The shell around it is `services.supervisor.processes`.

    WAITING ──begin or delay over──▶ RUNNING ──exited──▶ WAITING (back-off)      while serving
                                     RUNNING ──exited──▶ GONE                    while stopping

A stop goes by stages: the processes of one stage get SIGTERM, and the next stage's turn comes when all of
them are gone. Each stage has a bound, after which SIGKILL follows.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

CONFIGURATION_ERROR = (
    2  # exit status of a process whose settings or pool cannot work: starting it again cannot help
)


@dataclass(frozen=True)
class Policy:
    """How patient the supervisor is; all times in seconds."""

    first_delay: float = 0.1  # before the first restart; doubles with each further quick failure
    longest_delay: float = 10.0
    healthy_after: float = 10.0  # a process that lived this long did not fail quickly
    quick_failures: int = 6  # in a row, after which the supervisor gives up
    grace: float = 5.0  # from SIGTERM to SIGKILL, beyond a child's own drain time


@dataclass(frozen=True)
class Child:
    """One process to keep running. Those of the lowest `stage` are stopped first."""

    name: str
    stage: int
    drain: float = 0.0  # seconds that it may take to end by itself


@dataclass(frozen=True)
class Start:
    """Start the child."""

    name: str


@dataclass(frozen=True)
class Send:
    """Send the child a signal."""

    name: str
    signal: signal.Signals


@dataclass(frozen=True)
class Tell:
    """Tell the user what happened to a child."""

    name: str
    text: str


@dataclass(frozen=True)
class Finish:
    """All children are gone: exit with `status`; `failed` names the child that is the cause, if one is."""

    status: int
    failed: str = ""


Action = Start | Send | Tell | Finish


class Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass
class _Watched:
    child: Child
    phase: Phase = Phase.WAITING
    started_at: float = 0.0
    due: float = 0.0  # when WAITING: the time of the next start
    failures: int = 0  # quick ones in a row


@dataclass
class Supervision:
    """The state of all children. `deadline` is when `tick` is wanted next, or None."""

    children: Sequence[Child]
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        self._watched = {child.name: _Watched(child) for child in self.children}
        self._stage: int | None = (
            None  # those of this stage or a lower one are being stopped; None while serving
        )
        self._stage_end = 0.0  # when the stage's time is over
        self._killed = False  # whether the stage was sent SIGKILL
        self._finished = False
        self._status = 0
        self._failed = ""

    @property
    def stopping(self) -> bool:
        return self._stage is not None

    @property
    def deadline(self) -> float | None:
        if self._finished:
            return None
        if self.stopping:
            return self._stage_end
        return min((w.due for w in self._watched.values() if w.phase is Phase.WAITING), default=None)

    def begin(self, now: float) -> list[Action]:
        """Start every child, in the given order."""
        return self.tick(now)

    def exited(self, name: str, code: int, now: float) -> list[Action]:
        """The child's process is gone; `code` is its exit status, or minus the signal that ended it."""
        watched = self._watched[name]
        if watched.phase is Phase.GONE:
            return []  # it was left behind and ended after all
        if watched.phase is Phase.WAITING:
            raise ValueError(f"{name} exited while it was not running")
        if self.stopping:
            watched.phase = Phase.GONE
            return self._next_stage(now)
        watched.phase = Phase.WAITING
        if code == 0:  # somebody asked it to end, to have a new one
            watched.failures, watched.due = 0, now + self.policy.first_delay
            return [Tell(name, f"has ended; starting another in {self.policy.first_delay:g} s")]
        quick = now - watched.started_at < self.policy.healthy_after
        watched.failures = watched.failures + 1 if quick else 1
        if code == CONFIGURATION_ERROR:
            return self._give_up(name, CONFIGURATION_ERROR, f"{_how(code)}: its settings cannot work", now)
        if watched.failures > self.policy.quick_failures:
            return self._give_up(name, 1, f"{_how(code)}: {watched.failures} quick failures, giving up", now)
        delay = min(self.policy.first_delay * 2 ** (watched.failures - 1), self.policy.longest_delay)
        watched.due = now + delay
        return [
            Tell(name, f"{_how(code)} after {now - watched.started_at:.1f} s; starting again in {delay:g} s")
        ]

    def stuck(self, name: str, seconds: float) -> list[Action]:
        """The child lives, and has shown no progress for so long: have it replaced."""
        if self.stopping or self._watched[name].phase is not Phase.RUNNING:
            return []
        return [Tell(name, f"has made no progress for {seconds:g} s: killed"), Send(name, signal.SIGKILL)]

    def tick(self, now: float) -> list[Action]:
        """Do what has become due: restarts, or SIGKILL to those that did not stop in time."""
        if self._finished:
            return []
        if self.stopping:
            return self._overdue(now) if now >= self._stage_end else []
        due = [w for w in self._watched.values() if w.phase is Phase.WAITING and w.due <= now]
        for watched in due:
            watched.phase, watched.started_at = Phase.RUNNING, now
        return [Start(watched.child.name) for watched in due]

    def stop(self, now: float, status: int = 0) -> list[Action]:
        """The first call stops stage by stage and sets the exit status, a further one kills all at once."""
        if self._finished:
            return []
        if self.stopping:
            self._stage = max(child.stage for child in self.children)
            return self._kill(now)
        for watched in self._watched.values():
            if watched.phase is Phase.WAITING:
                watched.phase = Phase.GONE
        self._stage, self._status = -1, status
        return self._next_stage(now)

    def _give_up(self, name: str, status: int, text: str, now: float) -> list[Action]:
        self._failed = name
        return [Tell(name, text), *self.stop(now, status)]

    def _running(self) -> list[_Watched]:
        return [watched for watched in self._watched.values() if watched.phase is Phase.RUNNING]

    def _in_stage(self) -> list[_Watched]:
        return [w for w in self._running() if self._stage is not None and w.child.stage <= self._stage]

    def _next_stage(self, now: float) -> list[Action]:
        """If the present stage is empty, send SIGTERM to the next one; if none is left, finish."""
        if self._in_stage():
            return []
        running = self._running()
        if not running:
            self._finished = True
            return [Finish(self._status, self._failed)]
        self._stage, self._killed = min(watched.child.stage for watched in running), False
        members = [watched.child for watched in self._in_stage()]
        self._stage_end = now + max(child.drain for child in members) + self.policy.grace
        return [Send(child.name, signal.SIGTERM) for child in members]

    def _kill(self, now: float) -> list[Action]:
        self._killed, self._stage_end = True, now + self.policy.grace
        return [Send(watched.child.name, signal.SIGKILL) for watched in self._in_stage()]

    def _overdue(self, now: float) -> list[Action]:
        """The stage's time is over: SIGKILL; and if even that did not end a process, go on without it."""
        if not self._killed:
            return self._kill(now)
        left: list[Action] = []
        for watched in self._in_stage():
            watched.phase, self._status = Phase.GONE, 1
            left.append(Tell(watched.child.name, "does not end even after SIGKILL: left behind"))
        return [*left, *self._next_stage(now)]


def _how(code: int) -> str:
    return f"exited with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
