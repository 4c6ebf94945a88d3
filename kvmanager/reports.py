"""Step reports: first checked as a whole, then applied as a whole. A report with any fault changes nothing.

The check follows the report's order (progress, forks, ends, copies, credits taken, credits returned) on
notes of its own; what it lets through, the second half applies without looking again.
"""

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


class InvalidReport(Exception):
    """What is wrong with a report, in one line."""


class ReportCheck:
    """One report on its way through the check."""

    __slots__ = ("_born", "_computed", "_ended", "_pool", "_runner", "_spent", "_tokens")

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        self._runner = runner
        self._pool = pool
        self._tokens: dict[Sequence, int] = {}  # known tokens after this report's progress
        self._computed: dict[Sequence, int] = {}
        self._born: dict[tuple[int, int], Sequence] = {}  # child → the sequence whose table it shares
        self._ended: set[tuple[int, int]] = set()
        self._spent: set[int] = set()  # credits used or returned

    def check(self, report: StepReport) -> None:
        """Raises InvalidReport."""
        for progress in report.progress:
            self._advance(progress)
        for forked in report.forked:
            self._fork(forked)
        for ended in report.ended:
            self._end(ended)
        for copied in report.copied:
            self._copy(copied)
        for taken in report.taken:
            self._find(taken.start_id, taken.choice)
            for ref in taken.blocks:
                self._spend(ref)
        for ref in report.returned:
            self._spend(ref)
        if not 0 <= report.credits_wanted <= MAX_CREDITS_WANTED:
            raise InvalidReport(f"credits_wanted is {report.credits_wanted}")

    def _find(self, start_id: int, choice: int) -> Sequence:
        """The live sequence; for one born in this report, the one that it was forked from."""
        key = (start_id, choice)
        active = self._runner.active.get(start_id)
        sequence = self._born.get(key) or (active.sequences.get(choice) if active else None)
        if sequence is None or key in self._ended:
            raise InvalidReport(f"no sequence {choice} of start {start_id} runs here")
        return sequence

    def _advance(self, item: Progress | Ended) -> None:
        sequence = self._find(item.start_id, item.choice)
        known = self._tokens.get(sequence, len(sequence.tokens)) + len(item.new_token_ids)
        before = self._computed.get(sequence, sequence.num_computed)
        computed = item.num_computed_tokens
        size = self._pool.block_size
        if (item.start_id, item.choice) in self._born:
            if computed // size > before // size:
                raise InvalidReport(f"{name(item)} was forked in this report and has already filled a block")
        else:
            if not before <= computed <= min(known, len(sequence.table) * size):
                raise InvalidReport(
                    f"{name(item)} has computed {computed} tokens, of {known} known, after {before}, "
                    f"in {len(sequence.table)} blocks"
                )
            for block in sequence.table[sequence.num_sealed : computed // size]:
                if self._pool.ref_count[block] != 1:
                    raise InvalidReport(f"{name(item)} has filled block {block}, which it shares")
            self._tokens[sequence] = known
            self._computed[sequence] = computed
        submit = self._runner.active[item.start_id].request.submit
        if known > len(submit.prompt_token_ids) + submit.sampling.max_tokens:
            raise InvalidReport(f"{name(item)} has {known} tokens, more than its max_tokens allows")
        check_token_ids(item)

    def _fork(self, item: Forked) -> None:
        parent = self._find(item.start_id, item.choice)
        sequences = self._runner.active[item.start_id].sequences
        for child in item.children:
            key = (item.start_id, child)
            if child in sequences or key in self._born or not 0 <= child < MAX_CHOICES:
                raise InvalidReport(f"sequence {child} of start {item.start_id} cannot be forked: it exists")
            self._born[key] = parent

    def _end(self, item: Ended) -> None:
        self._advance(item)
        self._ended.add((item.start_id, item.choice))

    def _copy(self, item: Copied) -> None:
        sequence = self._find(item.start_id, item.choice)
        sealed = max(sequence.num_sealed, self._computed.get(sequence, 0) // self._pool.block_size)
        if not sealed <= item.index < len(sequence.table):
            raise InvalidReport(f"{name(item)} cannot replace entry {item.index} of its table")
        self._spend(item.block)

    def _spend(self, ref: BlockRef) -> None:
        block, generation = ref
        if (
            block not in self._runner.credits
            or self._pool.generation[block] != generation
            or block in self._spent
        ):
            raise InvalidReport(f"block {block} of generation {generation} is not a credit of this runner")
        self._spent.add(block)


def name(item: Progress | Ended | Copied | Taken) -> str:
    return f"sequence {item.choice} of start {item.start_id}"


def check_token_ids(item: Progress | Ended) -> None:
    try:
        token_array(item.new_token_ids)
    except OverflowError:
        raise InvalidReport(f"{name(item)} has a token id that is negative or does not fit 32 bits") from None


def apply(state: State, runner: Runner, report: StepReport, pool: BlockPool, now: float) -> None:
    """Apply a report that `ReportCheck` has let through."""
    active = runner.active
    for progress in report.progress:
        sequence = active[progress.start_id].sequences[progress.choice]
        sequence.advance(pool, progress.new_token_ids, progress.num_computed_tokens, now)
    for forked in report.forked:
        fork(runner, active[forked.start_id], forked, pool)
    for ended in report.ended:
        end(state, active[ended.start_id], ended, pool, now)
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
    if report.ended or report.copied or report.returned:
        state.admission_due = True


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
    assert pool.state[shared] is RESERVED
    runner.credits.remove(block)
    pool.transfer(block, runner, sequence)
    sequence.table[item.index] = block
    pool.release(shared, sequence)


def end(state: State, active: ActiveStart, item: Ended, pool: BlockPool, now: float) -> None:
    """Take one sequence's blocks back; with the last one, the start is over."""
    sequence = active.sequences.pop(item.choice)
    sequence.advance(pool, item.new_token_ids, item.num_computed_tokens, now)
    choices = (sequence.choice, *sequence.pending_forks)
    active.runner.seats -= len(choices)
    output = tuple(sequence.tokens[len(active.request.prompt) :])
    if item.reason == "preempted" and len(output) < active.request.submit.sampling.max_tokens:
        active.resume.extend(Choice(choice, output) for choice in choices)
    sequence.release(pool)
    if not active.sequences:
        finish(state, active)


def finish(state: State, active: ActiveStart) -> None:
    """All sequences have ended. What was preempted waits again, in its old place; all else is over."""
    del active.runner.active[active.start_id]
    request = active.request
    request.active = None
    if request.state is RequestState.GONE:
        return
    if not active.resume:
        state.forget(request)
        return
    request.state = RequestState.WAITING
    request.groups = request.group(tuple(active.resume))
    state.waiting.add(request)
