"""One simulated host: all processes, the clock, who dies when, and what must be true after each message.

Everything that chance decides comes from one generator, so a seed replays exactly.
"""

from collections import Counter, deque
from random import Random
from typing import Any, Final

from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, RESERVED
from kvmanager.pool.invariants import audit
from kvmanager.protocol import Directives
from kvmanager.records import unpack
from kvmanager.state import Effects, Policy
from tests.sim import checks
from tests.sim.frontend import Frontend
from tests.sim.handover import Handovers
from tests.sim.manager import Disk, Manager, ManagerKilledError
from tests.sim.model import BLOCK_SIZE, LAYOUT
from tests.sim.network import Connection
from tests.sim.process import Process
from tests.sim.runner import Capacity, Runner
from tests.sim.sharing import Sharing
from tests.sim.tier import Copier
from tests.sim.workload import Workload, shape

TICK: Final = 0.05  # seconds, of the manager
MEAN_TURN: Final = 0.001  # seconds
MANAGER_SHARE: Final = 0.4  # of all turns
STALLS: Final = (0.01, 0.01, 0.05, 0.05, 0.2, 1.5)  # seconds; the last is longer than a runner is waited for
NAP: Final = 40.0  # seconds
NEVER: Final = float("inf")
SUBMIT_RATE: Final = 0.2  # per turn, while fewer requests live than may
REMEMBERED: Final = 400  # events that a failure prints
MAX_SETTLING_TURNS: Final = 40_000


class World:
    """`audit_every`: messages between two full audits; what is cheap is checked at each."""

    def __init__(self, seed: int, audit_every: int = 1, verbose: bool = False) -> None:
        self.random = Random(seed)
        self.shape = shape(seed, self.random)
        self.audit_every = audit_every
        self.verbose = verbose
        self.now = 100.0
        self.messages = 0
        self._misbehaving: set[str] = set()  # runners
        self.losses = 0  # runners that have died, left or were fenced
        self.statistics: Counter[str] = Counter()
        self.events: deque[tuple[float, str, str, Any]] = deque(maxlen=REMEMBERED)
        self.disk = Disk(self.shape.num_blocks, self.shape.num_slots)
        self.cells = [[0] * BLOCK_SIZE for _ in range(self.shape.num_blocks)]
        self.connections: list[Connection] = []
        self.contents = checks.Contents(self.cells)
        self.sharing = Sharing(self.statistics)
        self.handovers = Handovers(self.statistics)
        self.workload = Workload(self.random, self.shape)
        self.policy = Policy(200, 0.02, runner_wait=1000.0, pin_part=self.random.choice((1, 2, 256)))
        self.manager: Manager | None = None
        self.manager_from = 0.0  # when it starts again, or goes on
        self._boots = 0
        self._names = 0
        self._next_tick = 0.0
        self._unaudited = 0
        self._nap_at = NEVER  # when the clock leaps
        self._births: list[tuple[float, str, Capacity | None]] = []  # when, name, a runner's capacity
        self.processes: list[Process] = []
        self.frontends: list[Frontend] = []
        self.runners: list[Runner] = []
        self._boot()
        for capacity in self.shape.capacities:
            self._add(self._name("runner"), capacity)
        for _ in range(self.shape.num_frontends):
            self._add(self._name("frontend"), None)

    # --- for the processes ----------------------------------------------------------------------------------

    def trace(self, who: str, what: str, detail: Any) -> None:
        self.events.append((self.now, who, what, detail))
        if self.verbose:
            print(f"{self.now:9.4f} {who:12} {what} {detail}")

    def count(self, is_message: bool) -> None:
        """Probes are not counted."""
        self.messages += is_message

    def frontend(self, endpoint: str) -> Frontend | None:
        for frontend in self.frontends:
            if frontend.name == endpoint:
                return frontend
        return None

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self, num_messages: int) -> None:
        """Until so many messages have been delivered, then to a quiet end."""
        while self.messages < num_messages:
            self._disturb()
            self._turn()
        self._settle()

    def _turn(self) -> None:
        self.now += self.random.expovariate(1 / MEAN_TURN)
        if self.now > self._nap_at:
            self._nap_at, self.now = NEVER, self.now + NAP
        if self._births and self._births[0][0] <= self.now:
            _, name, capacity = self._births.pop(0)
            self._add(name, capacity)
        if self.random.random() < MANAGER_SHARE or not self.processes:
            if self.now >= self.manager_from:
                self._manager_turn()
            return
        process = self.random.choice(self.processes)
        if self.now >= process.stalled_until:
            process.turn()

    def _manager_turn(self) -> None:
        try:
            if self.manager is None:
                self._boot()
            elif self.now >= self._next_tick:
                self._next_tick = self.now + TICK
                self.manager.tick(self.now)
            elif not self._deliver(self.manager):
                return
        except ManagerKilledError:
            self._manager_killed()
        else:
            self._check()

    def _deliver(self, manager: Manager) -> bool:
        """One message; False if there is none."""
        waiting = [connection for connection in self.connections if connection.up]
        if not waiting:
            return False
        connection = self.random.choice(waiting)
        frames = connection.up.popleft()
        if not connection.up and not connection.client_lives:
            self.connections.remove(connection)
        self.count(bool(frames[1]))
        manager.take(self.now, connection, frames)
        return True

    def _boot(self) -> None:
        self._boots += 1
        self.trace("manager", "starts", self._boots)
        copier = Copier(self.disk.tier, self.cells, self.random)
        self.manager = Manager(self.disk, f"boot-{self._boots}", self.policy, copier, self.now)
        self.manager.core_layout = LAYOUT
        self.manager.misbehaving = self._misbehaving
        self.manager.trace = self.trace
        self.sharing.restart()
        self.manager.watch = self._watch
        self.manager.about_to_lose = self.handovers.died
        self.manager.open(self.now)

    def _watch(self, core: Core, effects: Effects) -> None:
        for watcher in (self.sharing, self.handovers):
            watcher.event(core, effects, self.workload.salts)

    # --- what happens to them -------------------------------------------------------------------------------

    def _disturb(self) -> None:
        if not self.frontends or not self.disk.records:
            return  # nobody is served before the first runner has come
        chance = self.random.random()
        if chance < SUBMIT_RATE:
            if sum(len(frontend.expected) for frontend in self.frontends) < self.shape.max_live:
                self.workload.submit(self.random.choice(self.frontends))
        elif chance > 1 - self.shape.cancel_rate:
            self.statistics["cancelled or stopped"] += 1
            self.workload.disturb(self.random.choice(self.frontends))
        elif chance > 1 - self.shape.cancel_rate - self.shape.fault_rate:
            self._fault()
        elif chance < SUBMIT_RATE + self.shape.pin_rate + self.shape.command_rate:
            self.workload.control(self.random.choice(self.frontends))

    def _fault(self) -> None:
        match self.random.choice(self.shape.faults):
            case "manager":
                self._light_the_fuse()
            case "stall":
                self._stall()
            case "nap":
                self._nap(self.random.choice(self.frontends))
            case "break":
                self._break(self.random.choice(self.processes))
            case "frontend":
                self._kill(self.random.choice(self.frontends))
            case kind if self.runners:
                self._hit(kind, self.random.choice(self.runners))

    def _hit(self, kind: str, runner: Runner) -> None:
        if kind == "runner":
            self._kill(runner)
        elif kind == "drain":
            self.trace(runner.name, "is told to end", "")
            runner.draining = True
        else:
            self.trace(runner.name, "misbehaves", "")
            self.losses += 1
            self._misbehaving.add(runner.name)
            runner.misbehave()

    def _light_the_fuse(self) -> None:
        if self.manager is not None and self.manager.fuse is None:
            self.manager.fuse = self.random.randint(0, 6)
            self.manager.tear = self.random.random() < 0.3

    def _manager_killed(self) -> None:
        manager = self.manager
        assert manager is not None
        self.trace("manager", "is killed", "")
        self.statistics["manager kills"] += 1
        self._count_counters(manager)
        self._check_contents(manager)
        manager.copier.killed()
        self.manager = None
        self.manager_from = self.now + self.random.choice((0.001, 0.01, 0.05, 0.3))
        for connection in list(self.connections):
            connection.manager_killed(self.random)
            if not connection.client_lives:
                self.connections.remove(connection)

    def _kill(self, process: Process) -> None:
        self.trace(process.name, "is killed", "")
        sent = len(process.connection.up)
        process.killed()
        self.handovers.killed(process, sent == len(process.connection.up))
        self.statistics[f"{type(process).__name__.lower()} kills"] += 1
        self._remove(process)

    def exit(self, runner: Runner) -> None:
        """It has drained."""
        self.trace(runner.name, "exits", "")
        runner.exited()
        self.statistics["runner exits"] += 1
        self._remove(runner)

    def _remove(self, process: Process) -> None:
        """The supervisor starts another, under the same name or a new one."""
        self.processes.remove(process)
        if isinstance(process, Runner):
            self.runners.remove(process)
        elif isinstance(process, Frontend):
            self.frontends.remove(process)
        if not process.connection.up:
            self.connections.remove(process.connection)
        capacity = process.capacity if isinstance(process, Runner) else None
        self.losses += capacity is not None
        kind = "runner" if capacity else "frontend"
        name = process.name if self.random.random() < 0.5 else self._name(kind)
        delay = self.random.choice((0.0, 0.01, 0.05, 0.3))
        self._births.append((self.now + delay, name, capacity))
        self._births.sort(key=lambda birth: birth[:2])

    def _stall(self) -> None:
        until = self.now + self.random.choice(STALLS)
        self.statistics["stalls"] += 1
        who = self.random.randrange(len(self.processes) + 1)
        if who == len(self.processes):
            self.manager_from = max(self.manager_from, until)
            self.trace("manager", "is stopped until", until)
        else:
            self.processes[who].stalled_until = until
            self.trace(self.processes[who].name, "is stopped until", until)

    def _nap(self, frontend: Frontend) -> None:
        """It is stopped, and the others are soon, for longer than tokens are kept for it."""
        self.trace(frontend.name, "naps", "")
        self.statistics["naps"] += 1
        frontend.stalled_until = self.now + NAP + 1.0
        self._nap_at = min(self._nap_at, self.now + 0.3)

    def _break(self, process: Process) -> None:
        if self.manager is not None:
            self.trace(process.name, "loses its connection", "")
            self.statistics["breaks"] += 1
            self.losses += 1
            process.connection.broken(self.random)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"

    def _add(self, name: str, capacity: Capacity | None) -> None:
        self.trace(name, "is started", capacity)
        process: Frontend | Runner
        if capacity is None:
            process = Frontend(self, name)
            self.frontends.append(process)
        else:
            process = Runner(self, name, capacity)
            self.runners.append(process)
        self.processes.append(process)

    # --- what must be true ----------------------------------------------------------------------------------

    def check_write(self, runner: Runner, block: int) -> None:
        checks.check_write(self.manager, self.disk, runner, block)

    def check_starts(self, directives: Directives) -> None:
        checks.check_starts(self.cells, self.disk, directives, self.workload.salts)

    def _check(self) -> None:
        """After each event at the manager: what it has sealed is there; and, now and then, everything."""
        manager = self.manager
        if manager is None or manager.core.state.pool is None:
            return
        self._check_contents(manager)
        self._unaudited += 1
        if self._unaudited >= self.audit_every:
            self._unaudited = 0
            self.statistics["audits"] += 1
            violated = audit(manager.core.state)
            assert not violated, violated

    def _check_contents(self, manager: Manager) -> None:
        pool = manager.core.state.pool
        if pool is not None and manager.touched:
            self.contents.check(pool, manager.touched)
            manager.touched = set()

    # --- the end --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Nothing more goes wrong: every request finishes, and nobody holds anything any more."""
        for process in self.processes:
            process.stalled_until = 0.0
        for _ in range(MAX_SETTLING_TURNS):
            self._turn()
            if self._quiet():
                break
        else:
            raise AssertionError(f"not at rest after {MAX_SETTLING_TURNS} turns: {self._unrest()}")
        manager = self.manager
        assert manager is not None
        self._count_counters(manager)
        state = manager.core.state
        pool = state.pool
        assert pool is not None
        assert audit(state) == []
        self.contents.check(pool, set(range(pool.num_blocks)))
        unused = pool.counts[FREE] + pool.counts[CACHED]
        assert unused + len(state.pins.uses) == pool.num_blocks, pool.statistics()
        for block, record in enumerate(self.disk.records):
            kept, want = unpack(record, BLOCK_SIZE), pool.record(block)
            if kept is not None and kept.state == RESERVED and want.state == FREE:
                kept = kept._replace(state=FREE, owner_tag=want.owner_tag)  # its owner died with the manager
            assert kept == want, f"block {block}: kept {kept}, want {want}"

    def _quiet(self) -> bool:
        if self.manager is None or self._births or self.manager.core.state.survivors:
            return False
        if self.manager.copier.under_way:
            return False
        if any(frontend.expected for frontend in self.frontends):
            return False
        if not all(runner.idle and runner.session.session for runner in self.runners):
            return False
        busy = any(
            frames[1] for connection in self.connections for frames in (*connection.up, *connection.down)
        )
        known = self.manager.core.state.clients.keys() == {
            self._client_id(process) for process in self.processes
        }
        return known and not busy and not any(frontend.pipes_full for frontend in self.frontends)

    def _client_id(self, process: Process) -> int:
        """In the manager's present start; 0 if it has no session there."""
        session = process.session.session
        assert self.manager is not None
        current = session is not None and session.boot_id == self.manager.core.state.boot_id
        return session.client_id if session is not None and current else 0

    def _unrest(self) -> str:
        assert self.manager is not None
        state = self.manager.core.state
        live = [(r.request_id, r.attempt, r.accepted) for f in self.frontends for r in f.expected]
        running = [(r.name, r.scheduler.statistics()) for r in self.runners]
        pool = state.pool.statistics() if state.pool else None
        waiting = [request.submit.request_id for request in state.waiting]
        alive = [(process.name, self._client_id(process)) for process in self.processes]
        who = f"survivors {state.survivors}, alive {alive}, to come {self._births}"
        return f"live {live}, waiting {waiting}, runners {running}, {pool}, {who}"

    def _count_counters(self, manager: Manager) -> None:
        counters = manager.core.state.counters
        self.statistics["preemptions"] += counters.preemptions
        self.statistics["hit tokens"] += counters.prefix_cache_hits
        self.statistics["prefix waits"] += counters.prefix_waits
        self.statistics["recomputed tokens"] += counters.recomputed_tokens
        self.statistics["fenced"] += len(manager.faults)
        if manager.core.state.pool is not None:
            self.statistics["evictions"] += manager.core.state.pool.evictions
        if manager.core.state.tiering is not None:
            self.statistics["demotions"] += manager.core.state.tiering.tier.demotions
            self.statistics["promotions"] += manager.core.state.tiering.tier.promotions
