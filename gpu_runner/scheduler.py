"""Which sequences get which tokens this step: continuous batching without I/O, torch, sockets or a clock.

One step is `handle` (what the manager said), `schedule` (a plan), `report` (what to tell the manager), then,
once the executor has computed the plan, `update` (the tokens for the frontends). Nothing is handled between
`schedule` and `update`, so whatever ends in `handle` has no step in flight that writes its blocks.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from gpu_runner.beams import Beams, count_needs
from gpu_runner.credits import Credits, look_ahead
from gpu_runner.request import EndReason, RunningRequest, RunningSequence, begin
from gpu_runner.shared_tails import SharedTails
from gpu_runner.start_faults import find_fault, refusal
from gpu_runner.step import Candidate, Sampled, Scheduled, SequenceOutput, StepOutput, StepPlan
from gpu_runner.step_report import ReportBuilder, taken_by_others, without_others
from gpu_runner.stop_conditions import finish
from kvmanager.protocol import (
    MAX_VOCABULARY,
    Directives,
    Holdings,
    SearchState,
    Start,
    StepReport,
    TokenEvent,
)

REMEMBERED_STARTS: Final = 4096
"""Start ids kept to recognise a start that comes twice."""


@dataclass(frozen=True, slots=True)
class Limits:
    """All in tokens, but `max_num_seqs`; token ids are below `vocab_size`."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = MAX_VOCABULARY


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """What is running now, and counters since the scheduler was made."""

    requests: int
    sequences: int
    credits: int  # blocks in hand
    steps: int
    sat_out: int  # times that a sequence missed a step for want of a block
    copies: int  # blocks copied on the first write into a shared tail


class Scheduler:
    """The running sequences of one runner under one session with the manager."""

    def __init__(self, limits: Limits, eos_token_ids: frozenset[int]) -> None:
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._requests: dict[int, RunningRequest] = {}
        self._running: dict[tuple[int, int], RunningSequence] = {}
        self._seen_starts: deque[int] = deque(maxlen=REMEMBERED_STARTS)
        self._credits = Credits()
        self._tails = SharedTails()
        self._uncopied: dict[tuple[int, int], RunningSequence] = {}  # whose first step is to copy `copy_from`
        self._beams: dict[int, Beams] = {}  # by start_id
        self._report = ReportBuilder(limits.block_size)
        self._held_back: list[StepReport] | None = None  # while a manager that has restarted may not know us
        self._plan: StepPlan | None = None
        self._steps = 0
        self._sat_out = 0
        self._copies = 0

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            len(self._requests),
            len(self._running),
            len(self._credits),
            self._steps,
            self._sat_out,
            self._copies,
        )

    # --- what the manager says -----------------------------------------------------------------------------

    def handle(self, directives: Directives) -> dict[str, list[TokenEvent]]:
        """Apply directives; stale start ids and starts that came before are ignored.

        Returns, by frontend endpoint, the ends of those starts that cannot be computed.
        """
        assert self._plan is None, "directives came while a step was in flight"
        self._credits.grant(directives.credits)
        refused: dict[str, list[TokenEvent]] = {}
        for start in directives.starts:
            self._start(start)
            if fault := find_fault(start, self._limits.vocab_size, self._limits.max_model_len):
                self._end_all(start.start_id, "finished")
                refused.setdefault(start.token_endpoint, []).append(refusal(start, fault))
        for start_id in directives.cancels:
            self._end_all(start_id, "cancelled")
        for start_id in directives.preempts:
            self._end_all(start_id, "preempted")
        return refused

    def _start(self, start: Start) -> None:
        if start.start_id in self._seen_starts:
            return
        self._seen_starts.append(start.start_id)
        request = self._requests[start.start_id] = RunningRequest(start)
        max_model_len = self._limits.max_model_len
        for given in start.sequences:
            running = begin(start, given, self._limits.block_size, max_model_len)
            self._add(request, running)
            if running.copy_from is not None:
                self._uncopied[running.key] = running
        if (params := start.sampling.beam) is not None:
            self._beams[start.start_id] = Beams(start, params, self._eos_token_ids, max_model_len)

    def _add(self, request: RunningRequest, running: RunningSequence) -> None:
        request.sequences[running.sequence.choice] = running
        self._running[running.key] = running

    def _end_all(self, start_id: int, reason: EndReason) -> None:
        request, beams = self._requests.get(start_id), self._beams.get(start_id)
        search: SearchState | None = None
        for running in list(request.sequences.values()) if request else ():
            # One whose prompt's log-probabilities nobody has been told yet starts as it did.
            if beams is not None and reason == "preempted" and running.prompt_logprobs is None:
                search, beams = beams.state(running.num_output_tokens), None
            self._end(running, reason, search)
            search = None

    def _end(self, running: RunningSequence, reason: EndReason, search: SearchState | None = None) -> None:
        self._tails.leave(running.sequence.block_table[-1])
        self._report.ended(running, reason, search)
        del self._running[running.key]
        self._uncopied.pop(running.key, None)
        request = self._requests[running.start.start_id]
        del request.sequences[running.sequence.choice]
        if not request.sequences:
            del self._requests[running.start.start_id]
            self._beams.pop(running.start.start_id, None)

    # --- over a restart of the manager ---------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """All that runs, for a manager that has restarted; until it has said what it keeps, reports are held
        back. Left out are starts that have yet to copy their first tokens: these may not be there any more.
        """
        assert self._plan is None, "holdings while a step was in flight"
        self._report, self._held_back = ReportBuilder(self._limits.block_size), []
        size, copying = self._limits.block_size, {start_id for start_id, _ in self._uncopied}
        held = [request.held(size) for key, request in self._requests.items() if key not in copying]
        return Holdings(tuple(held), tuple(self._credits))

    def keep_only(self, start_ids: Collection[int]) -> list[StepReport]:
        """Of the holdings, the manager has taken over these starts, and the credits; all else ends here.
        Returns the reports that were held back.
        """
        assert self._plan is None, "starts end while a step was in flight"
        for start_id in self._requests.keys() - {*start_ids}:
            self._end_all(start_id, "cancelled")
        last = self._report.build((), self._report.credits_wanted, self.num_tail_tokens)
        held_back, self._held_back = [*(self._held_back or ()), last], None
        reports = [report for report in held_back if report is not None]
        self._credits.grant(taken_by_others(reports, start_ids))
        return without_others(reports, start_ids)

    # --- the plan -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step: decodes first, then prefill chunks in order of start; None when nothing can run."""
        assert self._plan is None, "schedule before the last step's update"
        self._steps += 1
        scheduled: list[Scheduled] = []
        copies: list[tuple[int, int]] = []
        max_decodes = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        # Who missed a step comes first; otherwise the order stays.
        for running in sorted(self._running.values(), key=_last_step):
            if running.num_uncomputed_tokens == 1 and len(scheduled) < max_decodes:
                if self._make_room(running, copies):
                    scheduled.append(self._planned(running, 1))
                else:
                    self._sat_out += 1
        self._add_prefills(scheduled)
        if scheduled:
            first_copies = [running.first_copy() for running in self._uncopied.values() if running.planned]
            self._plan = StepPlan(tuple(scheduled), (*copies, *first_copies))
            self._copies += len(copies)
        return self._plan

    def _add_prefills(self, scheduled: list[Scheduled]) -> None:
        """Fill what the decodes left. A start's table covers its tokens, so no credit is needed."""
        budget = self._limits.max_num_batched_tokens - len(scheduled)
        for running in self._running.values():
            if budget == 0 or len(scheduled) == self._limits.max_num_seqs:
                return
            if running.num_uncomputed_tokens > 1:
                length = min(running.num_uncomputed_tokens, budget)
                scheduled.append(self._planned(running, length))
                budget -= length

    def _planned(self, running: RunningSequence, length: int) -> Scheduled:
        sequence = running.sequence
        running.planned, running.last_step = length, self._steps
        samples = length == running.num_uncomputed_tokens
        sample_choices = (sequence.choice, *sequence.forks) if samples else ()
        return Scheduled(sequence, sequence.num_computed_tokens, length, sample_choices)

    def _make_room(self, running: RunningSequence, copies: list[tuple[int, int]]) -> bool:
        """See that the next token has a block of its own to go to; False for want of a credit."""
        sequence = running.sequence
        table, index = sequence.block_table, sequence.num_computed_tokens // self._limits.block_size
        if index < len(table) and not self._tails.is_shared(table[index]):
            return True
        block = self._credits.take()
        if block is None:
            return False
        if index == len(table):
            table.append(block[0])
            self._report.taken(running, block)
        else:
            copies.append((table[index], block[0]))
            self._tails.leave(table[index])
            table[index] = block[0]
            self._report.copied(running, index, block)
        return True

    # --- what to tell the manager --------------------------------------------------------------------------

    def report(self) -> StepReport | None:
        """What has changed since the last report; None if nothing has. To be called after each `schedule`."""
        wanted = look_ahead(self._needs())
        report = self._report.build(self._credits.give_back(wanted), wanted, self.num_tail_tokens)
        if self._held_back is not None and report is not None:
            self._held_back.append(report)
        return report if self._held_back is None else None

    @property
    def num_tail_tokens(self) -> int:
        """Tokens in blocks that the manager does not know as full, as after the planned step."""
        tails: dict[int, int] = {}  # first such block of a sequence → tokens from there on
        for running in self._running.values():
            sequence, told = running.sequence, running.num_told_blocks
            length = sequence.num_computed_tokens + running.planned - told * self._limits.block_size
            if length and (running.planned or running.key not in self._uncopied):
                tail = sequence.block_table[told]
                tails[tail] = max(length, tails.get(tail, 0))
        return sum(tails.values())

    def _needs(self) -> Counter[int]:
        """Steps after the planned one → blocks needed then; exact for decodes, an estimate for prefills."""
        needs: Counter[int] = Counter()
        block_size, budget = self._limits.block_size, self._limits.max_num_batched_tokens
        if self._tails.num_copies_due:
            needs[0] = self._tails.num_copies_due
        for start_id in self._beams:
            count_needs(needs, self._requests[start_id].sequences.values(), block_size, budget)
        for running in self._running.values():
            if running.start.start_id in self._beams:
                continue
            sequence = running.sequence
            num_tokens = len(sequence.token_ids)
            steps = -(-(running.num_uncomputed_tokens - running.planned) // budget)
            capacity = len(sequence.block_table) * block_size
            if capacity < running.num_final_tokens:
                needs[steps + capacity - num_tokens] += 1 + len(sequence.forks)
            if sequence.forks and num_tokens < min(capacity, running.num_final_tokens):
                needs[steps] += len(sequence.forks)
        return needs

    # --- what the step computed ----------------------------------------------------------------------------

    def update(self, plan: StepPlan, output: StepOutput) -> dict[str, list[TokenEvent]]:
        """Take in the step's results; returns the new tokens by frontend endpoint, in the plan's order."""
        assert plan is self._plan, "update with another plan than the one in flight"
        self._plan = None
        events: dict[str, list[TokenEvent]] = {}
        for item, result in zip(plan.scheduled, output.outputs, strict=True):
            running = self._running[item.sequence.start_id, item.sequence.choice]
            self._advance(running, item, result)
            if not item.sample_choices:
                continue
            if (beams := self._beams.get(running.start.start_id)) is None:
                owners = self._fork(running, running.sequence.forks)
                new = [self._append(*pair) for pair in zip(owners, result.sampled, strict=True)]
            else:
                new = self._search(beams, running, result.candidates)
            if new:
                events.setdefault(running.start.token_endpoint, []).extend(new)
        return events

    def _advance(self, running: RunningSequence, item: Scheduled, result: SequenceOutput) -> None:
        running.planned = 0
        running.sequence.num_computed_tokens += item.length
        if self._uncopied.pop(running.key, None):
            self._report.source_read(running)
        if running.prompt_logprobs is not None:
            running.prompt_logprobs.extend(result.prompt_logprobs)
        self._report.advanced(running)

    def _search(
        self, beams: Beams, running: RunningSequence, candidates: tuple[Candidate, ...]
    ) -> list[TokenEvent]:
        """Once the last beam has its candidates: fork and drop, or end the search and give its results."""
        if not beams.offer(running.sequence.choice, candidates):
            return []
        sequences = self._requests[running.start.start_id].sequences
        moves = beams.decide()
        if beams.over:
            for beam in list(sequences.values()):
                self._end(beam, "finished")
            return beams.results(running.num_cached_tokens, running.take_prompt_logprobs())
        for move in moves:
            if move.token_ids:
                owners = self._fork(sequences[move.choice], move.children)
                for owner, token_id in zip(owners, move.token_ids, strict=True):
                    owner.sequence.token_ids.append(token_id)
            else:
                self._end(sequences[move.choice], "dropped")
        return self._tell_search(beams, list(sequences.values()))

    def _tell_search(self, beams: Beams, running: list[RunningSequence]) -> list[TokenEvent]:
        """Where the search stands, if a block is full."""
        first = running[0]
        if first.sequence.num_computed_tokens % self._limits.block_size:
            return []
        state, start = beams.state(first.num_output_tokens), first.start
        if state is None:
            return []
        event = TokenEvent(
            start.request_id,
            start.attempt,
            0,
            0,
            (),
            first.num_cached_tokens,
            prompt_logprobs=first.take_prompt_logprobs(),
            search=state,
        )
        for beam in running:
            beam.prompt_logprobs = None
        return [event]

    def _fork(self, running: RunningSequence, choices: tuple[int, ...]) -> list[RunningSequence]:
        """The sequence and its children of these numbers, if any, which share its table."""
        sequence = running.sequence
        if not choices:
            return [running]
        children = [running.fork(choice) for choice in choices]
        for child in children:
            self._add(self._requests[running.start.start_id], child)
        if sequence.num_computed_tokens % self._limits.block_size:
            self._tails.share(sequence.block_table[-1], len(children))
        self._report.forked(running, choices)
        sequence.forks = ()
        return [running, *children]

    def _append(self, running: RunningSequence, sampled: Sampled) -> TokenEvent:
        """Give the sequence its new token, and end it if that was its last."""
        sequence, start = running.sequence, running.start
        assert sampled.choice == sequence.choice, f"choice {sequence.choice} got a token of {sampled.choice}"
        position = running.num_output_tokens
        sequence.token_ids.append(sampled.token_id)
        verdict = finish(
            sampled.token_id,
            position + 1,
            len(sequence.token_ids),
            sequence.sampling,
            self._eos_token_ids,
            self._limits.max_model_len,
        )
        event = TokenEvent(
            start.request_id,
            start.attempt,
            sequence.choice,
            position,
            (sampled.token_id,),
            running.num_cached_tokens,
            None if sampled.logprobs is None else (sampled.logprobs,),
            running.take_prompt_logprobs(),
            verdict.reason,
            verdict.stop_reason,
        )
        if verdict.reason is not None:
            self._end(running, "finished")
        return event


def _last_step(running: RunningSequence) -> int:
    return running.last_step
