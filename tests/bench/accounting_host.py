"""A host without processes: the real manager core and a real runner's scheduler, with a model that draws its
tokens from a hash and a clock that stands still. What the core says, the runner hears at its next step.
"""

import math
import struct
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Final

from gpu_runner.beams import num_candidates
from gpu_runner.scheduler import Limits, Scheduler
from gpu_runner.step import Candidate, Sampled, Scheduled, Sequence, SequenceOutput, StepOutput
from kvmanager.core import Core
from kvmanager.pool.block_pool import RESERVED, SEALED, BlockPool
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Choice,
    Directives,
    FrontendHello,
    Layout,
    Ready,
    RunnerHello,
    SamplingParams,
    Submit,
    ToManager,
    Welcome,
)
from kvmanager.state import Policy

BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 2048  # tokens: what a prompt and an answer of the mix may have at most
BUDGET: Final = 2048  # tokens per step
VOCABULARY: Final = 30_000
LAYOUT: Final = Layout("accounting", "float32", BLOCK_SIZE, 1, 1, 1)
NOW: Final = 1.0


@dataclass
class Usage:
    """Sums over the steps at which the host was full: from the first end on, while further requests wait."""

    steps: int = 0
    requests: int = 0  # that ran
    held: int = 0  # slots in blocks that running sequences hold, credits included
    filled: int = 0  # of these, slots with a token
    shared: int = 0  # blocks in the tables of running sequences
    unshared: int = 0  # how many it would take if each sequence had its own

    @property
    def waste(self) -> float:
        """Share of the held slots without a token."""
        return 1 - self.filled / self.held

    @property
    def at_once(self) -> float:
        """Requests, on average."""
        return self.requests / self.steps

    @property
    def saving(self) -> float:
        """Blocks saved by sharing over blocks without sharing, as the paper counts."""
        return 1 - self.shared / self.unshared


class Host:
    """Submit, then `step` until `idle`. Requests start as blocks and seats allow."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self.usage = Usage()
        self.core = Core("accounting", "/pool", Policy(max_waiting=1 << 20), NOW)
        self.pool = BlockPool(num_blocks, LAYOUT)
        self.core.attach(self.pool)
        self._inbox: deque[Directives] = deque()
        runner = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, max_num_seqs, MAX_MODEL_LEN)
        self._frontend = self._hello(FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "tokens"))
        self._runner = self._hello(runner)
        self.scheduler = Scheduler(Limits(BLOCK_SIZE, max_num_seqs, BUDGET, MAX_MODEL_LEN), frozenset())
        self._say(self._runner, Ready())

    def _hello(self, hello: FrontendHello | RunnerHello) -> int:
        answer, _ = self.core.hello(NOW, hello)
        assert isinstance(answer, Welcome)
        return answer.session.client_id

    def _say(self, client_id: int, message: ToManager) -> None:
        effects = self.core.handle(NOW, client_id, message)
        self._inbox.extend(answer for _, answer in effects.messages if isinstance(answer, Directives))

    def submit(self, number: int, prompt: tuple[int, ...], choices: int, sampling: SamplingParams) -> None:
        wanted = tuple(map(Choice, range(choices)))
        self._say(self._frontend, Submit(f"r{number}", 0, float(number), prompt, wanted, sampling))

    @property
    def idle(self) -> bool:
        running = self.scheduler.statistics().sequences
        return not (running or self._inbox or len(self.core.state.waiting))

    def step(self) -> None:
        while self._inbox:
            self.scheduler.handle(self._inbox.popleft())
        plan = self.scheduler.schedule()
        if (report := self.scheduler.report()) is not None:
            self._say(self._runner, report)
        if plan is not None:
            self._measure()
            self.scheduler.update(plan, StepOutput(tuple(map(_compute, plan.scheduled))))

    def _measure(self) -> None:
        """What the step in flight finds; its report, if it had anything to tell, has been handled."""
        state = self.core.state
        if not len(state.waiting) or not state.runners[0].finished:
            return
        usage, counts, actives = self.usage, self.pool.counts, state.actives()
        sequences = [sequence for active in actives for sequence in active.sequences.values()]
        usage.steps += 1
        usage.requests += len(actives)
        usage.held += (counts[RESERVED] + counts[SEALED]) * BLOCK_SIZE
        usage.filled += counts[SEALED] * BLOCK_SIZE + self.scheduler.num_tail_tokens
        usage.shared += len({block for sequence in sequences for block in sequence.table})
        usage.unshared += sum(len(each.table) * (1 + len(each.pending_forks)) for each in sequences)


def _compute(item: Scheduled) -> SequenceOutput:
    sequence, end = item.sequence, item.start + item.length
    if not item.sample_choices:
        return SequenceOutput(())
    if sequence.sampling.beam is not None:
        return SequenceOutput((), candidates=_candidates(sequence, end))
    tokens = (_hash(sequence.sampling.seed, choice, end) % VOCABULARY for choice in item.sample_choices)
    return SequenceOutput(tuple(map(Sampled, item.sample_choices, tokens)))


def _candidates(sequence: Sequence, end: int) -> tuple[Candidate, ...]:
    """`width` tokens; their probabilities are broken off a stick: each a uniform share of the rest."""
    found, rest = [], 1.0
    for rank in range(num_candidates(sequence.sampling, ())):
        drawn = _hash(sequence.sampling.seed, *sequence.token_ids[-2:], end, rank)
        share = rest * (drawn + 1) / (1 << 32)
        rest -= share * 0.999
        found.append(Candidate(drawn % VOCABULARY, math.log(share)))
    return tuple(sorted(found, key=lambda candidate: -candidate.logprob))


def _hash(*values: int) -> int:
    return zlib.crc32(struct.pack(f"<{len(values)}q", *values))
