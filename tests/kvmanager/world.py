"""A small world around the manager's core: its processes, its records, and a model that knows the right
answer to everything in the most naive way. Processes are killed and the manager restarted between any two
events.
"""

from typing import Any

from kvmanager import records
from kvmanager.asking.event_log import EventLog
from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.invariants import audit
from kvmanager.protocol import Directives, Start, StepReport, Submit, Welcome
from kvmanager.restore import restore_pool
from kvmanager.scheduling.pins import PinKey, SavedPin
from kvmanager.scheduling.requests import StartState
from kvmanager.state import Effects, Policy
from tests.kvmanager.fake_clients import (
    BLOCK_SIZE,
    LAYOUT,
    FakeFrontend,
    FakeRunner,
    FakeSequence,
    Process,
)

RING = 64  # events that a manager remembers here


class World:
    """One manager, its pool and its processes."""

    def __init__(self, num_blocks: int = 16, policy: Policy | None = None) -> None:
        self.num_blocks = num_blocks
        self.policy = policy or Policy(max_waiting=6, watermark=0.05, runner_wait=1e9, prefix_wait=100.0)
        self.now = 0.0
        self.boots = 0
        self.names = 0
        self.processes: dict[str, Process] = {}
        self.everyone: dict[str, Process] = {}
        self.cells: list[list[Any]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.content: dict[
            int, tuple[str, tuple[int, ...]]
        ] = {}  # sealed block → salt and all tokens up to its end
        self.unsent: dict[str, list[tuple[int, tuple[str, tuple[int, ...]]]]] = {}
        self.salts: dict[tuple[str, str], tuple[str, bool]] = {}
        self.commanded = False  # Evict or Clear was said
        self.saved_pins: dict[PinKey, SavedPin | None] = {}
        pool = BlockPool(num_blocks, LAYOUT, EventLog(RING))
        self.records = [records.pack(pool.record(block), BLOCK_SIZE) for block in range(num_blocks)]
        self.boot(pool, (), ())

    def boot(self, pool: BlockPool, quarantines: Any, survivors: tuple[str, ...]) -> None:
        self.boots += 1
        self.core = Core(f"boot-{self.boots}", "/pool", self.policy, self.now)
        self.core.attach(pool, quarantines, survivors)
        self.faults: list[str] = []
        self.core.on_fault = self.faults.append

    # --- what happens -----------------------------------------------------------------------------------

    def add(self, kind: type[Any]) -> Any:
        self.names += 1
        process = kind(self, f"{kind.__name__}-{self.names}")
        self.processes[process.name] = self.everyone[process.name] = process
        process.hello()
        return process

    def kill(self, process: Process) -> None:
        process.alive = False
        del self.processes[process.name]
        self.unsent.pop(process.name, None)
        self.carry_out(self.core.process_died(self.tick(), process.name))

    def restart(self) -> None:
        """The manager dies and starts again on its records; the others notice when they next send."""
        read = [records.unpack(record, BLOCK_SIZE) for record in self.records]
        survivors = tuple(self.processes)
        self.boot(*restore_pool(LAYOUT, read, survivors, EventLog(RING)), survivors)
        self.core.restore_pins(self.now, [pin for pin in self.saved_pins.values() if pin is not None])
        self.carry_out(self.core.tick(self.tick()))

    def wait(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self.now += seconds
        self.carry_out(self.core.tick(self.now))

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def hello(self, process: Any) -> Welcome:
        self.unsent.pop(process.name, None)
        answer, effects = self.core.hello(self.tick(), process.greeting())
        assert isinstance(answer, Welcome)
        self.carry_out(effects)
        return answer

    def deliver(self, process: Process, message: Any) -> bool:
        boot_id, client_id = process.session or ("", 0)
        if boot_id != self.core.state.boot_id or client_id not in self.core.state.clients:
            return False
        if isinstance(message, Submit):
            salt = message.tenant + message.cache_salt
            self.salts[(process.name, message.request_id)] = (salt, message.read_cache)
        effects = self.core.handle(self.tick(), client_id, message)
        if isinstance(message, StepReport):
            assert not effects.ended, self.faults
            self.content.update(self.unsent.pop(process.name, ()))
        self.carry_out(effects)
        return True

    def carry_out(self, effects: Effects) -> None:
        pool = self.core.state.pool
        assert pool is not None
        self.forget()
        for block in effects.records:
            self.records[block] = records.pack(pool.record(block), BLOCK_SIZE)
        self.saved_pins.update(effects.pins)
        directives = [message for _, message in effects.messages if isinstance(message, Directives)]
        for message in directives:
            for block, _ in message.credits:
                self.content.pop(block, None)
        for start in sorted((start for message in directives for start in message.starts), key=start_id):
            self.check_start(start)
        for client_id, message in effects.messages:
            session = (self.core.state.boot_id, client_id)
            for process in self.processes.values():
                if process.session == session:
                    process.inbox.append(message)

    def forget(self) -> None:
        """What a command has forgotten, or lets nobody find."""
        pool = self.core.state.pool
        assert pool is not None
        for block in list(self.content) if pool.unfound or self.commanded else ():
            if not pool.block_hash[block] or block in pool.unfound:
                del self.content[block]

    def frontend(self, name: str) -> FakeFrontend:
        found = self.everyone[name]
        assert isinstance(found, FakeFrontend)
        return found

    # --- what must be true ------------------------------------------------------------------------------

    def sealed(self, runner: FakeRunner, sequence: FakeSequence, tail: bool = False) -> None:
        """Noted when the runner has filled blocks, or left a tail; true from its next report on."""
        salt, _ = self.salts[(sequence.start.token_endpoint, sequence.start.request_id)]
        notes = self.unsent.setdefault(runner.name, [])
        for index in range(sequence.computed // BLOCK_SIZE):
            prefix = tuple(sequence.tokens[: (index + 1) * BLOCK_SIZE])
            notes.append((sequence.table[index], (salt, prefix)))
        if tail and sequence.computed % BLOCK_SIZE:
            block = sequence.table[sequence.computed // BLOCK_SIZE]
            notes.append((block, (salt, tuple(sequence.tokens[: sequence.computed]))))

    def check_start(self, start: Start) -> None:
        """Its hits are those that the naive model finds, and every hit holds exactly the right tokens."""
        salt, read_cache = self.salts[(start.token_endpoint, start.request_id)]
        read_cache |= any(given.output_token_ids for given in start.sequences)
        findable = set(self.content.values())
        for sequence in start.sequences:
            tokens = (*start.prompt_token_ids, *sequence.output_token_ids)
            hits = 0
            while read_cache and (hits + 1) * BLOCK_SIZE < len(tokens):
                if (salt, tokens[: (hits + 1) * BLOCK_SIZE]) not in findable:
                    break
                hits += 1
            shared = self.longest_tail(salt, tokens, hits * BLOCK_SIZE) if read_cache else 0
            if shared and not sequence.num_cached_tokens % BLOCK_SIZE:
                self.check_copies_given_up(start)
                shared = 0
            assert sequence.num_cached_tokens == hits * BLOCK_SIZE + shared, (start, hits, shared)
            self.check_nobody_computes(start, salt, tokens, hits if read_cache else len(tokens))
            assert len(sequence.block_table) == -(-len(tokens) // BLOCK_SIZE)
            assert (sequence.copy_from is not None) == (shared > 0)
            holding = [block for block, _ in sequence.block_table[:hits]]
            holding += [sequence.copy_from[0]] if sequence.copy_from else []
            for position in range(sequence.num_cached_tokens):
                cell = self.cells[holding[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert cell == tokens[: position + 1]
        for sequence in start.sequences:
            for block, _ in sequence.block_table[sequence.num_cached_tokens // BLOCK_SIZE :]:
                self.content.pop(block, None)

    def longest_tail(self, salt: str, tokens: tuple[int, ...], start: int) -> int:
        """How many tokens from `start` on, but for the last, some block that follows there begins with."""
        most = 0
        for other_salt, prefix in self.content.values():
            if other_salt == salt and start < len(prefix) <= start + BLOCK_SIZE:
                same = 0
                while same < min(len(prefix), len(tokens) - 1) and prefix[same] == tokens[same]:
                    same += 1
                most = max(most, same - start)
        return most

    def check_nobody_computes(self, start: Start, salt: str, tokens: tuple[int, ...], hits: int) -> None:
        """No start before this one is about to compute its next full block, or it takes too long."""
        end = (hits + 1) * BLOCK_SIZE
        for active in self.core.state.actives():
            earlier = active.start_id < start.start_id and active.state is StartState.RUNNING
            submit = active.request.submit
            same_salt = submit.tenant + submit.cache_salt == salt
            for sequence in active.sequences.values() if earlier and same_salt and end <= len(tokens) else ():
                if sequence.num_settled > hits:
                    continue
                given = sequence.tokens[: len(sequence.announced) * BLOCK_SIZE]
                assert tuple(given[:end]) != tokens[:end] or (salt, tokens[:end]) in self.content.values(), (
                    f"start {start.start_id} computes what start {active.start_id} does"
                )

    def check_copies_given_up(self, start: Start) -> None:
        """Only where the block to copy from has to be evicted, as nothing else runs that could make room."""
        state = self.core.state
        assert state.pool is not None
        assert state.actives()[0].start_id == start.start_id
        assert state.pool.available < len(start.sequences)

    def check(self) -> None:
        assert audit(self.core.state) == []
        pool = self.core.state.pool
        assert pool is not None
        for block in range(self.num_blocks):
            assert records.unpack(self.records[block], BLOCK_SIZE) == pool.record(block), (
                f"record of block {block}"
            )
            if pool.block_hash[block] and block not in pool.unfound:
                assert block in self.content, f"block {block} is findable and the model does not know it"
                prefix = self.content[block][1]
                first = (len(prefix) - 1) // BLOCK_SIZE * BLOCK_SIZE
                right = [prefix[: end + 1] for end in range(first, len(prefix))]
                assert self.cells[block][: len(right)] == right, f"block {block}"
        for process in self.processes.values():
            if isinstance(process, FakeRunner):
                for sequence in process.sequences.values():
                    for position in range(sequence.computed):
                        block = sequence.table[position // BLOCK_SIZE]
                        if (
                            sequence.source is not None
                            and position // BLOCK_SIZE == sequence.computed // BLOCK_SIZE
                        ):
                            block = sequence.source
                        assert self.cells[block][position % BLOCK_SIZE] == tuple(
                            sequence.tokens[: position + 1]
                        )

    # --- the end ----------------------------------------------------------------------------------------

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [process for process in self.processes.values() if isinstance(process, kind)]

    def finish(self, max_rounds: int = 300) -> None:
        """Let everything run to its end: all requests finish, and nothing is held but by nobody."""
        if not any(not runner.draining for runner in self.of_kind(FakeRunner)):
            self.add(FakeRunner)
        for _ in range(max_rounds):
            for frontend in self.of_kind(FakeFrontend):
                frontend.read()
            for runner in self.of_kind(FakeRunner):
                runner.step()
            self.check()
            busy = [frontend for frontend in self.of_kind(FakeFrontend) if frontend.requests]
            if not busy and all(runner.idle for runner in self.of_kind(FakeRunner)):
                break
        else:
            raise AssertionError(f"not finished after {max_rounds} rounds")
        state = self.core.state
        assert state.pool is not None
        assert state.pool.counts[0] + state.pool.counts[3] == self.num_blocks, state.pool.statistics()
        assert not len(state.waiting)


def start_id(start: Start) -> int:
    return start.start_id
