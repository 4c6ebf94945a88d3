"""An engine without a model: its KV is the tokens themselves, its next token a function of what it reads.

So a wrong block table, a missing copy or a block written by two sequences gives wrong tokens, or fails here.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_runner.beams import num_candidates
from gpu_runner.step import Candidate, Sampled, Scheduled, SequenceOutput, StepOutput, StepPlan
from kvmanager.protocol import Layout, SamplingParams, TokenLogprobs

VOCABULARY = 13
EOS = 0
STOP = 1


def next_token(history: Sequence[int], choice: int, sampling: SamplingParams, num_output: int) -> int:
    """What the model says after `history`; no stop token before `min_tokens`, as a sampler does."""
    token = zlib.crc32(bytes(history) + bytes([choice])) % VOCABULARY
    return 2 + token % (VOCABULARY - 2) if num_output < sampling.min_tokens else token


def next_logprobs(history: Sequence[int], sampling: SamplingParams, num_output: int) -> list[float]:
    """What the model thinks of every token after `history`, for beams; steep, so that scores differ."""
    barred = {EOS, *sampling.stop_token_ids} if num_output < sampling.min_tokens else set()
    return [
        -math.inf if token in barred else -1e-6 * (1 + zlib.crc32(bytes([*history, token])) % 4_000_000)
        for token in range(VOCABULARY)
    ]


def logprob_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), 1, ())


def expected_output(
    prompt: Sequence[int], choice: int, sampling: SamplingParams, max_model_len: int
) -> tuple[list[int], str, int | None]:
    """All of a choice's tokens, its finish reason and its stop reason, computed one by one on a list."""
    output: list[int] = []
    while True:
        output.append(next_token([*prompt, *output], choice, sampling, len(output)))
        if len(output) >= sampling.min_tokens:
            if output[-1] == EOS and not sampling.ignore_eos:
                return output, "stop", None
            if output[-1] in sampling.stop_token_ids:
                return output, "stop", output[-1]
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length", None


Writable = Callable[[int, tuple[int, int]], None]


@dataclass
class FakeEngine:
    """An `Engine`. `may_write(block_id, (start_id, choice))` raises where it must not."""

    block_size: int = 4
    vocab_size: int = VOCABULARY
    max_model_len: int = 48
    shared_pool: bool = True
    may_write: Writable = lambda block_id, key: None
    blocks: dict[int, list[int | None]] = field(default_factory=dict)
    attached: list[tuple[str, int]] = field(default_factory=list)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    progress: Callable[[], None] = lambda: None

    @property
    def layout(self) -> Layout:
        return Layout("fake", "float32", self.block_size, 1, 1, 1)

    def describe(self) -> Mapping[str, object]:
        return {"model": "fake"}

    def attach(self, pool_directory: str, num_blocks: int) -> None:
        self.attached.append((pool_directory, num_blocks))

    def warm_up(self, progress: Callable[[str], None]) -> None:
        progress("step=1/1")

    def show_progress(self, progress: Callable[[], None]) -> None:
        self.progress = progress

    def execute(self, plan: StepPlan) -> StepOutput:
        self.progress()
        for source, destination in plan.copies:
            self.blocks[destination] = list(self.blocks[source])
        for item in plan.scheduled:
            self._write(item)
        return StepOutput(tuple(self._read(item) for item in plan.scheduled))

    def _write(self, item: Scheduled) -> None:
        sequence = item.sequence
        assert item.start == sequence.num_computed_tokens
        for position in range(item.start, item.start + item.length):
            block_id = sequence.block_table[position // self.block_size]
            self.may_write(block_id, (sequence.start_id, sequence.choice))
            block = self.blocks.setdefault(block_id, [None] * self.block_size)
            block[position % self.block_size] = sequence.token_ids[position]

    def _read(self, item: Scheduled) -> SequenceOutput:
        sequence, end = item.sequence, item.start + item.length
        table, size = sequence.block_table, self.block_size
        history = [self.blocks[table[position // size]][position % size] for position in range(end)]
        assert history == sequence.token_ids[:end], f"start {sequence.start_id} choice {sequence.choice}"
        num_output = end - sequence.num_prompt_tokens
        beam = sequence.sampling.beam is not None
        candidates = self._offer(item, num_output) if beam and item.sample_choices else ()
        sampled = tuple(
            Sampled(choice, next_token(sequence.token_ids[:end], choice, sequence.sampling, num_output))
            for choice in (() if beam else item.sample_choices)
        )
        successors = range(item.start + 1, min(end + 1, sequence.num_prompt_tokens))
        return SequenceOutput(
            sampled, tuple(logprob_of(sequence.token_ids[position]) for position in successors), candidates
        )

    def _offer(self, item: Scheduled, num_output: int) -> tuple[Candidate, ...]:
        """A beam's candidates, no more than the executor gives."""
        sequence, end = item.sequence, item.start + item.length
        assert item.sample_choices == (sequence.choice,)
        logprobs = next_logprobs(sequence.token_ids[:end], sequence.sampling, num_output)
        offers = [Candidate(token, value) for token, value in enumerate(logprobs) if value > -math.inf]
        offers.sort(key=lambda offer: -offer.logprob)
        count = num_candidates(sequence.sampling, self.eos_token_ids)
        return tuple(offers[:count])
