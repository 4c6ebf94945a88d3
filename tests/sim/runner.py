"""A runner's process in the simulator: the real scheduler and outboxes, in a shell like its server's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpu_runner.scheduler import Limits, Scheduler
from gpu_runner.step import StepPlan
from gpu_runner.token_outbox import TokenOutbox
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Directives,
    Draining,
    Fenced,
    Holdings,
    Ready,
    RunnerHello,
    StepReport,
    TokenEvent,
    Welcome,
    encode,
)
from kvmanager.scheduling.clients import owner_tag
from tests.sim.model import BLOCK_SIZE, EOS, LAYOUT, MAX_MODEL_LEN, Engine
from tests.sim.network import TokenPipe
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

EOS_TOKEN_IDS: Final = frozenset({EOS})
FRONTEND_SECONDS: Final = 30.0
NO_BLOCK: Final = (0, 1 << 40)  # in a generation that never comes
IMPATIENCE: Final = 0.003  # per turn: how likely a draining runner's time is over


@dataclass(frozen=True)
class Capacity:
    max_num_seqs: int
    max_num_batched_tokens: int


class Runner(Process):
    """A turn is half a step: take messages, plan and report; or compute the plan and push the tokens."""

    def __init__(self, world: "World", name: str, capacity: Capacity) -> None:
        self.capacity = capacity
        hello = RunnerHello(PROTOCOL_VERSION, name, name, LAYOUT, capacity.max_num_seqs, MAX_MODEL_LEN)
        super().__init__(world, name, hello)
        self.tag = owner_tag(name)
        self.engine = Engine(world.cells, lambda block: world.check_write(self, block))
        self.outboxes: dict[str, TokenOutbox] = {}  # by frontend
        self.pipes: dict[str, TokenPipe] = {}
        self._refused_since: dict[str, float] = {}  # seconds
        self.plan: StepPlan | None = None
        self.draining = False
        self.told = False  # the manager was told that it is draining
        self.dismissed = False  # and has all back
        self.boot_id = ""  # of the manager whose session it has, or had last
        self._begin()

    def _begin(self) -> None:
        limits = Limits(
            BLOCK_SIZE, self.capacity.max_num_seqs, self.capacity.max_num_batched_tokens, MAX_MODEL_LEN
        )
        self.scheduler = Scheduler(limits, EOS_TOKEN_IDS)
        self.plan = None
        self.unreported: dict[tuple[int, int], int] = {}  # tokens of the step that no report tells of yet
        self.told = self.dismissed = False
        self.rests = False
        self.held: Holdings | None = None  # what a manager that has restarted is told; None: none is

    @property
    def idle(self) -> bool:
        """Nothing runs, the manager knows of it, and every frontend that lives has its tokens."""
        unsent = any(outbox for name, outbox in self.outboxes.items() if self.world.frontend(name))
        return self.rests and not unsent and not self.scheduler.statistics().credits

    def turn(self) -> None:
        if self.draining and self._may_exit():
            self.world.exit(self)
            return
        if self.session.session is None and self.held is None:
            self._await_session()
        elif self.plan is not None:
            self._compute()
        else:
            self._plan()
        self._push()

    def _await_session(self) -> None:
        if not self.connection.down:
            self.repeat_hello()
        elif isinstance(message := self.receive(), Welcome):
            self._taken_over(message)

    def _taken_over(self, welcome: Welcome) -> None:
        self.boot_id, late = welcome.session.boot_id, []
        if welcome.kept:
            self.world.statistics["starts taken over"] += len(welcome.kept)
            late = self.scheduler.keep_only(welcome.kept)
            self.held, self.told = None, False
        else:
            self._begin()
        for each in (Ready(), *late):
            self.send(each)

    def _plan(self) -> None:
        """As much as has come; how much that is, chance decides."""
        for _ in range(self.world.random.randint(0, len(self.connection.down))):
            message = self.receive()
            if isinstance(message, Fenced):
                running = self.scheduler.statistics().sequences
                if message.boot_id != self.boot_id and running:
                    self.held = self.scheduler.holdings()
                self.say_hello(self.held)
                if self.held is None:
                    return
            elif isinstance(message, Welcome):
                self._taken_over(message)
            if isinstance(message, Directives):
                self.world.check_starts(message)
                self.scheduler.handle(message)
                self.dismissed |= message.dismissed
        if self.held is not None:
            self.repeat_hello(self.held)
        self.probe()
        if self.draining and not self.told and self.held is None:
            self.told = True
            self.send(Draining())
        self.plan = None if self.draining else self.scheduler.schedule()
        self.rests = self.plan is None
        self.rests &= self.held is None
        if (report := self.scheduler.report()) is not None:
            self.rests = False
            self.send(report)
        self.unreported = {}

    def _may_exit(self) -> bool:
        """As the server has it: all is handed back, or there is no session, or the time for it is over."""
        if self.dismissed:
            self.world.statistics["handed over"] += 1
            return True
        if self.held is None and self.session.session is None:
            return True
        return (self.told or self.held is not None) and self.world.random.random() < IMPATIENCE

    def _compute(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        self.unreported = {
            (item.sequence.start_id, item.sequence.choice): item.length for item in plan.scheduled
        }
        for endpoint, events in self.scheduler.update(plan, self.engine.execute(plan)).items():
            self._add(endpoint, events)

    def _add(self, endpoint: str, events: list[TokenEvent]) -> None:
        self.world.handovers.told(events)
        self.outboxes.setdefault(endpoint, TokenOutbox()).add(events)

    def _push(self) -> None:
        """What a pipe does not take stays, for FRONTEND_SECONDS; a frontend that has died takes nothing."""
        for endpoint, outbox in self.outboxes.items():
            if not outbox:
                continue
            pipe = self._pipe(endpoint)
            if pipe is not None and pipe.has_room:
                pipe.batches.append(encode(outbox.batch()))
                outbox.clear()
                self._refused_since.pop(endpoint, None)
            elif self.world.now - self._refused_since.setdefault(endpoint, self.world.now) > FRONTEND_SECONDS:
                self.world.trace(self.name, "drops tokens for", endpoint)
                self.world.statistics["outboxes dropped"] += 1
                outbox.clear()
                del self._refused_since[endpoint]

    def _pipe(self, endpoint: str) -> TokenPipe | None:
        """To the frontend that lives under this name, if there is one."""
        frontend, pipe = self.world.frontend(endpoint), self.pipes.get(endpoint)
        if frontend is None:
            return None
        if pipe is None or pipe not in frontend.pipes:
            pipe = self.pipes[endpoint] = TokenPipe()
            frontend.pipes.append(pipe)
        return pipe

    def misbehave(self) -> None:
        """Report what cannot be, as a runner with a fault might: the manager fences it."""
        if self.session.session is not None:
            self.send(StepReport(returned=(NO_BLOCK,)))

    def killed(self) -> None:
        super().killed()
        for pipe in self.pipes.values():
            pipe.runner_killed(self.world.random)

    def exited(self) -> None:
        """What the pipes hold is still delivered; frontends that take nothing lose the rest."""
        super().exited()
        for pipe in self.pipes.values():
            pipe.runner_lives = False
