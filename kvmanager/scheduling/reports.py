"""Step reports: first checked as a whole, then applied as a whole. A report with any fault changes nothing.

The check follows the report's order (sources read, progress, forks, ends, copies, credits taken, credits
returned) on notes of its own; what it lets through, the second half applies without looking again.

This is most of what a step costs the manager, so each item is looked at as few times as can be.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Literal

from kvmanager.pool.block_pool import RESERVED, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.protocol import (
    MAX_CHOICES,
    BlockRef,
    Choice,
    Copied,
    Ended,
    Forked,
    Progress,
    SearchState,
    StepReport,
    Taken,
)
from kvmanager.scheduling.clients import Runner
from kvmanager.scheduling.requests import ActiveStart, RequestState
from kvmanager.scheduling.searches import find_state_fault
from kvmanager.state import State

MAX_CREDITS_WANTED = 1 << 20
SHARE_MEMORY = 16  # sequences that have ended, after which what they came to counts for a third
MAX_TOKEN_ID = (1 << 32) - 1

EndReason = Literal["finished", "cancelled", "preempted", "dropped"]


class InvalidReport(Exception):
    """What is wrong with a report, in one line."""


class ReportCheck:
    """One report on its way through the check, which goes first over all of it.

    Tokens and progress are noted on the sequences themselves, where what follows finds them: if the report is
    refused, they end with their runner's session, and nobody looks at them again.
    """

    __slots__ = (
        "_active",
        "_born",
        "_credits",
        "_ended",
        "_holders",
        "_pool",
        "_read",
        "_sharing",
        "_size",
        "named",
        "spent",
    )

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        self.named: list[Sequence] = []  # by each item of the report, in the order of its fields
        self.spent: set[int] = set()  # credits used or returned
        self._active = runner.active
        self._credits = runner.credits
        self._pool = pool
        self._size = pool.block_size
        self._holders = pool.ledger.by_block
        self._born: dict[tuple[int, int], Sequence] = {}  # by start_id and choice; not yet among the start's
        self._sharing: set[Sequence] = set()  # forked in this report, or forked off
        self._ended: set[Sequence] = set()
        self._read: set[Sequence] = set()  # that have copied from their source

    def check(self, report: StepReport) -> None:
        """Raises InvalidReport."""
        for start_id, choice in report.sources_read:
            self._copied(self._find(start_id, choice))
        self._advance(report.progress)
        for forked in report.forked:
            self._fork(forked)
        for ended in report.ended:
            self._advance((ended,))
            self._ended.add(self.named[-1])
            if ended.search is not None:
                self._check_search(ended.start_id, ended.search)
        for copied in report.copied:
            self._copy(copied)
        for taken in report.taken:
            self._find(taken.start_id, taken.choice)
            self._spend(taken.blocks)
        self._spend(report.returned)
        if not 0 <= report.credits_wanted <= MAX_CREDITS_WANTED:
            raise InvalidReport(f"credits_wanted is {report.credits_wanted}")
        if not 0 <= report.num_tail_tokens <= self._pool.num_blocks * self._pool.block_size:
            raise InvalidReport(f"num_tail_tokens is {report.num_tail_tokens}")

    def _find(self, start_id: int, choice: int) -> Sequence:
        """The live sequence, which perhaps only this report has brought about."""
        sequence: Sequence | None
        try:
            sequence = self._active[start_id].sequences[choice]
        except KeyError:
            sequence = self._born.get((start_id, choice))
        if sequence is None or sequence in self._ended:
            raise InvalidReport(f"no sequence {choice} of start {start_id} runs here")
        self.named.append(sequence)
        return sequence

    def _copied(self, sequence: Sequence) -> None:
        if sequence.source is None or sequence in self._read:
            raise InvalidReport(f"{sequence.describe()} has nothing to copy from")
        self._read.add(sequence)

    def _advance(self, items: Iterable[Progress | Ended]) -> None:
        find, size = self._find, self._size
        for item in items:
            sequence = find(item.start_id, item.choice)
            tokens, table = sequence.tokens, sequence.table
            before, computed = sequence.num_computed, item.num_computed_tokens
            try:
                tokens.fromlist([*item.new_token_ids])  # in half of the time that `extend` takes
            except OverflowError:
                raise InvalidReport(f"{name(item)} has a token id outside 0 to {MAX_TOKEN_ID}") from None
            known = len(tokens)
            if not before <= computed <= known or computed > len(table) * size:
                raise InvalidReport(
                    f"{name(item)} has computed {computed} tokens, of {known} known, after {before}, "
                    f"in {len(table)} blocks"
                )
            if known > sequence.max_length:
                raise InvalidReport(f"{name(item)} has {known} tokens, more than its max_tokens allows")
            if sequence.source is not None and sequence not in self._read and computed > before:
                raise InvalidReport(
                    f"{name(item)} has computed {computed} tokens and not copied those before"
                )
            if sequence.forked:
                self._check_alone(item, sequence, table[before // size : computed // size])
            sequence.num_computed = computed

    def _check_alone(self, item: Progress | Ended, sequence: Sequence, filled: list[int]) -> None:
        for block in filled:
            if len(self._holders[block]) != 1 or sequence in self._sharing:
                raise InvalidReport(f"{name(item)} has filled block {block}, which it shares")

    def _fork(self, item: Forked) -> None:
        parent = self._find(item.start_id, item.choice)
        sequences = self._active[item.start_id].sequences
        for choice in item.children:
            key = (item.start_id, choice)
            if choice in sequences or key in self._born or not 0 <= choice < MAX_CHOICES:
                raise InvalidReport(f"sequence {choice} of start {item.start_id} cannot be forked: it exists")
            child = self._born[key] = parent.fork(choice)
            self._sharing |= {parent, child}
            self.named.append(child)

    def _check_search(self, start_id: int, search: SearchState) -> None:
        sampling = self._active[start_id].request.submit.sampling
        width = 0 if sampling.beam is None else sampling.beam.width
        if fault := find_state_fault(search, width, sampling.max_tokens):
            raise InvalidReport(f"start {start_id}: {fault}")

    def _copy(self, item: Copied) -> None:
        sequence = self._find(item.start_id, item.choice)
        sealed = sequence.num_computed // self._pool.block_size
        if not sealed <= item.index < len(sequence.table):
            raise InvalidReport(f"{name(item)} cannot replace entry {item.index} of its table")
        self._spend((item.block,))

    def _spend(self, refs: Iterable[BlockRef]) -> None:
        spent, credits, current = self.spent, self._credits, self._pool.generation
        for block, generation in refs:
            if block not in credits or block in spent or generation != current[block]:
                raise InvalidReport(
                    f"block {block} of generation {generation} is not a credit of this runner, or taken twice"
                )
            spent.add(block)


def name(item: Progress | Ended | Copied | Taken) -> str:
    return f"sequence {item.choice} of start {item.start_id}"


def apply(
    state: State, runner: Runner, report: StepReport, check: ReportCheck, pool: BlockPool, now: float
) -> None:
    """Apply a report that `check` has let through."""
    active, sequences = runner.active, iter(check.named)
    for _ in report.sources_read:
        next(sequences).copied(pool)
    for sequence in islice(sequences, len(report.progress)):
        sequence.seal(pool, now)
        if sequence.num_settled < len(sequence.announced):
            measure(state, active[sequence.start_id], sequence, now)
            if state.in_flight.settle(sequence):
                state.admission_due = True
    for forked in report.forked:
        parent = next(sequences)
        for child in islice(sequences, len(forked.children)):
            fork(runner, active[forked.start_id], parent, child, pool)
    for ended in report.ended:
        if ended.search is not None and runner.draining:
            active[ended.start_id].request.search = ended.search
        end(state, active[ended.start_id], next(sequences), ended.reason, pool, now)
    for copied in report.copied:
        replace_entry(runner, next(sequences), copied, pool)
    holders = pool.ledger.by_block
    for taken in report.taken:
        sequence = next(sequences)
        for block, _ in taken.blocks:
            holders[block] = (sequence,)  # instead of the runner, who held its credit alone
            sequence.table.append(block)
    for block, _ in report.returned:
        pool.release(block, runner)
    runner.credits -= check.spent
    runner.credits_wanted = report.credits_wanted
    runner.num_tail_tokens = report.num_tail_tokens
    if report.ended or report.copied or report.returned or report.sources_read:
        state.admission_due = True


def measure(state: State, active: ActiveStart, sequence: Sequence, now: float) -> None:
    """The first report on given tokens of a start tells how fast they are computed here, the wait for it
    included.
    """
    began, active.started_at = active.started_at, None
    computed = sequence.num_computed - sequence.num_cached
    if (
        began is not None
        and state.tiering is not None
        and computed
        and sequence.num_computed <= sequence.num_given
    ):
        state.tiering.tier.computing.add(computed, now - began, now)


def fork(runner: Runner, active: ActiveStart, parent: Sequence, child: Sequence, pool: BlockPool) -> None:
    """The child runs, too, in a seat that was kept for it or in one more."""
    child.share(pool, parent)
    active.sequences[child.choice] = child
    if child.choice in parent.pending_forks:
        parent.pending_forks = tuple(other for other in parent.pending_forks if other != child.choice)
    else:
        runner.seats += 1


def replace_entry(runner: Runner, sequence: Sequence, item: Copied, pool: BlockPool) -> None:
    block = item.block[0]
    shared = sequence.table[item.index]
    assert pool.state[shared] == RESERVED
    pool.ledger.replace(block, runner, sequence)
    sequence.table[item.index] = block
    pool.release(shared, sequence)


def end(
    state: State, active: ActiveStart, sequence: Sequence, reason: EndReason, pool: BlockPool, now: float
) -> None:
    """Take one sequence's blocks back; with the last one, the start is over."""
    del active.sequences[sequence.choice]
    measure(state, active, sequence, now)
    sequence.seal(pool, now)
    state.in_flight.withdraw(sequence)
    if reason != "dropped":
        sequence.seal_tail(pool, now)
    choices = (sequence.choice, *sequence.pending_forks)
    request, runner = active.request, active.runner
    runner.seats -= len(choices)
    if reason == "preempted" and request.submit.sampling.beam is not None:
        active.resume = request.beams()
        last = len(request.prompt) + len(active.resume[0].output_token_ids)
        request.computed = {choice.index: last - bool(choice.output_token_ids) for choice in active.resume}
    elif reason == "preempted" and len(sequence.tokens) < request.max_length:
        output = tuple(sequence.tokens[len(request.prompt) :])
        active.resume.extend(Choice(choice, output) for choice in choices)
        request.computed[sequence.choice] = sequence.num_computed
    elif reason != "dropped":
        runner.finished.append(
            (request.frontend.client_id, request.submit.request_id, request.submit.attempt)
        )
    if reason in ("finished", "cancelled"):
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
