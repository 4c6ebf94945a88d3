"""Step reports: first checked as a whole, then applied as a whole. A report with any fault changes nothing.

The check follows the report's order (sources read, progress, forks, ends, copies, credits taken, credits
returned) on notes of its own; what it lets through, the second half applies without looking again.

This is most of what a step costs the manager, so each item is looked at as few times as can be.
"""

from array import array

from kvmanager.block_pool import RESERVED, BlockPool
from kvmanager.block_table import Sequence
from kvmanager.clients import Runner
from kvmanager.hashing import token_array
from kvmanager.protocol import (
    MAX_CHOICES,
    BlockRef,
    Choice,
    Copied,
    Ended,
    Forked,
    Progress,
    StepReport,
    Taken,
)
from kvmanager.requests import ActiveStart, RequestState
from kvmanager.state import State

MAX_CREDITS_WANTED = 1 << 20
SHARE_MEMORY = 16  # sequences that have ended, after which what they came to counts for a third
MAX_TOKEN_ID = (1 << 32) - 1

Key = tuple[int, int]
"""(start_id, choice)."""


class InvalidReport(Exception):
    """What is wrong with a report, in one line."""


class ReportCheck:
    """One report on its way through the check."""

    __slots__ = ("_born", "_ended", "_notes", "_pool", "_read", "_runner", "_sharing", "_spent", "new_tokens")

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        self.new_tokens: list[array[int]] = []  # of each progress, then of each end
        self._runner = runner
        self._pool = pool
        self._notes: dict[Key, tuple[int, int]] = {}  # known and computed tokens so far in this report
        self._born: dict[Key, Sequence] = {}  # child → the sequence whose table it shares
        self._sharing: set[Key] = set()  # forked in this report, or forked off
        self._ended: set[Key] = set()
        self._spent: set[int] = set()  # credits used or returned
        self._read: set[Sequence] = set()  # that have copied from their source

    def check(self, report: StepReport) -> None:
        """Raises InvalidReport."""
        for key in report.sources_read:
            self._copied(key)
        for progress in report.progress:
            self._advance(progress)
        for forked in report.forked:
            self._fork(forked)
        for ended in report.ended:
            self._advance(ended)
            self._ended.add((ended.start_id, ended.choice))
        for copied in report.copied:
            self._copy(copied)
        for taken in report.taken:
            self._find((taken.start_id, taken.choice))
            self._spend(taken.blocks)
        if report.returned:
            self._spend(report.returned)
        if not 0 <= report.credits_wanted <= MAX_CREDITS_WANTED:
            raise InvalidReport(f"credits_wanted is {report.credits_wanted}")
        if not 0 <= report.num_tail_tokens <= self._pool.num_blocks * self._pool.block_size:
            raise InvalidReport(f"num_tail_tokens is {report.num_tail_tokens}")

    def _find(self, key: Key) -> Sequence:
        """The live sequence; for one born in this report, the one that it was forked from."""
        active = self._runner.active.get(key[0])
        sequence = active.sequences.get(key[1]) if active is not None else None
        if sequence is None:
            sequence = self._born.get(key)
        if sequence is None or key in self._ended:
            raise InvalidReport(f"no sequence {key[1]} of start {key[0]} runs here")
        return sequence

    def _so_far(self, key: Key, sequence: Sequence) -> tuple[int, int]:
        return self._notes.get(key) or (len(sequence.tokens), sequence.num_computed)

    def _copied(self, key: Key) -> None:
        sequence = self._find(key)
        if sequence.source is None or sequence in self._read:
            raise InvalidReport(f"sequence {key[1]} of start {key[0]} has nothing to copy from")
        self._read.add(sequence)

    def _advance(self, item: Progress | Ended) -> None:
        key = (item.start_id, item.choice)
        sequence = self._find(key)
        known, before = self._notes.get(key) or (len(sequence.tokens), sequence.num_computed)
        try:
            new = token_array(item.new_token_ids)
        except OverflowError:
            raise InvalidReport(f"{name(item)} has a token id outside 0 to {MAX_TOKEN_ID}") from None
        self.new_tokens.append(new)
        known += len(new)
        computed, table, size = item.num_computed_tokens, sequence.table, self._pool.block_size
        if computed < before or computed > known or computed > len(table) * size:
            raise InvalidReport(
                f"{name(item)} has computed {computed} tokens, of {known} known, after {before}, "
                f"in {len(table)} blocks"
            )
        if sequence.source is not None and computed > before and sequence not in self._read:
            raise InvalidReport(f"{name(item)} has computed {computed} tokens and not copied those before")
        for block in table[before // size : computed // size]:
            if self._pool.ledger.ref_count(block) != 1 or key in self._sharing:
                raise InvalidReport(f"{name(item)} has filled block {block}, which it shares")
        if known > self._runner.active[item.start_id].request.max_length:
            raise InvalidReport(f"{name(item)} has {known} tokens, more than its max_tokens allows")
        self._notes[key] = (known, computed)

    def _fork(self, item: Forked) -> None:
        key = (item.start_id, item.choice)
        parent = self._find(key)
        sequences = self._runner.active[item.start_id].sequences
        for choice in item.children:
            child = (item.start_id, choice)
            if choice in sequences or child in self._born or not 0 <= choice < MAX_CHOICES:
                raise InvalidReport(f"sequence {choice} of start {item.start_id} cannot be forked: it exists")
            self._born[child] = parent
            self._sharing |= {key, child}
            self._notes[child] = self._so_far(key, parent)

    def _copy(self, item: Copied) -> None:
        key = (item.start_id, item.choice)
        sequence = self._find(key)
        sealed = self._so_far(key, sequence)[1] // self._pool.block_size
        if not sealed <= item.index < len(sequence.table):
            raise InvalidReport(f"{name(item)} cannot replace entry {item.index} of its table")
        self._spend((item.block,))

    def _spend(self, blocks: tuple[BlockRef, ...]) -> None:
        credits, generations, spent = self._runner.credits, self._pool.generation, self._spent
        for block, generation in blocks:
            if block not in credits or generations[block] != generation or block in spent:
                raise InvalidReport(
                    f"block {block} of generation {generation} is not a credit of this runner"
                )
            spent.add(block)


def name(item: Progress | Ended | Copied | Taken) -> str:
    return f"sequence {item.choice} of start {item.start_id}"


def apply(
    state: State, runner: Runner, report: StepReport, new: "list[array[int]]", pool: BlockPool, now: float
) -> None:
    """Apply a report that `ReportCheck` has let through; `new` are the `new_tokens` that it has made."""
    active, new_tokens = runner.active, iter(new)
    for start_id, choice in report.sources_read:
        active[start_id].sequences[choice].copied(pool)
    for progress in report.progress:
        of = active[progress.start_id]
        sequence = of.sequences[progress.choice]
        if of.started_at is not None:
            measure(state, of, sequence, progress.num_computed_tokens, now)
        sequence.advance(pool, next(new_tokens), progress.num_computed_tokens, now)
        if sequence.num_settled < len(sequence.announced) and state.in_flight.settle(sequence):
            state.admission_due = True
    for forked in report.forked:
        fork(runner, active[forked.start_id], forked, pool)
    for ended in report.ended:
        end(state, active[ended.start_id], ended, next(new_tokens), pool, now)
    for copied in report.copied:
        sequence = active[copied.start_id].sequences[copied.choice]
        replace_entry(runner, sequence, copied, pool)
    for taken in report.taken:
        sequence = active[taken.start_id].sequences[taken.choice]
        for block, _ in taken.blocks:
            runner.credits.remove(block)
            pool.transfer(block, runner, sequence)
            sequence.table.append(block)
    for block, _ in report.returned:
        runner.credits.remove(block)
        pool.release(block, runner)
    runner.credits_wanted = report.credits_wanted
    runner.num_tail_tokens = report.num_tail_tokens
    if report.ended or report.copied or report.returned or report.sources_read:
        state.admission_due = True


def measure(state: State, active: ActiveStart, sequence: Sequence, num_computed: int, now: float) -> None:
    """The first report on a start tells how fast given tokens are computed here, the wait for it included."""
    if active.started_at is None:
        return
    if state.tiering is not None and sequence.num_computed < num_computed <= len(sequence.tokens):
        state.tiering.tier.computing.add(num_computed - sequence.num_computed, now - active.started_at, now)
    active.started_at = None


def fork(runner: Runner, active: ActiveStart, item: Forked, pool: BlockPool) -> None:
    parent = active.sequences[item.choice]
    for choice in item.children:
        active.sequences[choice] = parent.fork(pool, choice)
        if choice in parent.pending_forks:
            parent.pending_forks = tuple(other for other in parent.pending_forks if other != choice)
        else:
            runner.seats += 1


def replace_entry(runner: Runner, sequence: Sequence, item: Copied, pool: BlockPool) -> None:
    block = item.block[0]
    shared = sequence.table[item.index]
    assert pool.state[shared] == RESERVED
    runner.credits.remove(block)
    pool.transfer(block, runner, sequence)
    sequence.table[item.index] = block
    pool.release(shared, sequence)


def end(
    state: State, active: ActiveStart, item: Ended, new: "array[int]", pool: BlockPool, now: float
) -> None:
    """Take one sequence's blocks back; with the last one, the start is over."""
    sequence = active.sequences.pop(item.choice)
    measure(state, active, sequence, item.num_computed_tokens, now)
    sequence.advance(pool, new, item.num_computed_tokens, now)
    state.in_flight.withdraw(sequence)
    if item.reason != "dropped":
        sequence.seal_tail(pool, now)
    choices = (sequence.choice, *sequence.pending_forks)
    request, runner = active.request, active.runner
    runner.seats -= len(choices)
    if item.reason == "preempted" and request.submit.sampling.beam is not None:
        active.resume = list(request.submit.choices)  # a search starts over
        request.computed = {0: len(request.prompt)}
    elif item.reason == "preempted" and len(sequence.tokens) < request.max_length:
        output = tuple(sequence.tokens[len(request.prompt) :])
        active.resume.extend(Choice(choice, output) for choice in choices)
        request.computed[sequence.choice] = sequence.num_computed
    elif item.reason != "dropped":
        runner.finished.append(
            (request.frontend.client_id, request.submit.request_id, request.submit.attempt)
        )
    if item.reason in ("finished", "cancelled"):
        share = (len(sequence.tokens) - len(request.prompt)) / request.submit.sampling.max_tokens
        state.usual_share += (share - state.usual_share) / SHARE_MEMORY
    sequence.release(pool)
    if not active.sequences:
        finish(state, active)


def finish(state: State, active: ActiveStart) -> None:
    """All sequences have ended. What was preempted or postponed waits, in its old place; all else is over."""
    del active.runner.active[active.start_id]
    request = active.request
    request.active = None
    if request.state is RequestState.GONE:
        return
    if not active.resume and not request.later:
        state.forget(request)
        return
    request.groups = request.group(tuple(active.resume)) + request.later
    request.later = []
    request.state = RequestState.WAITING
    state.waiting.add(request)
