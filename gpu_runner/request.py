"""What the scheduler knows of a running request beyond what the executor sees of its sequences."""

from dataclasses import dataclass, field
from typing import Literal

from gpu_runner.step import Sequence
from kvmanager.protocol import HeldSequence, HeldStart, SequenceStart, Start, TokenLogprobs

EndReason = Literal["finished", "cancelled", "preempted", "dropped"]
"""As in `Ended`."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence and what the manager and the frontend know of it. Counts are in tokens or blocks."""

    start: Start
    sequence: Sequence
    num_cached_tokens: int  # of the prompt, at this start
    num_final_tokens: int  # tokens whose KV is ever computed: the last one sampled never is
    num_told_tokens: int  # tokens that the manager knows
    num_told_blocks: int  # full blocks that the manager was told of
    prompt_logprobs: list[TokenLogprobs] | None  # collected so far; None when not wanted or already sent
    copy_from: int | None = None  # block that the first step copies into the last one that is partly cached
    planned: int = 0  # tokens that the step in flight computes
    last_step: int = 0  # number of the last step that computed some

    @property
    def key(self) -> tuple[int, int]:
        return self.start.start_id, self.sequence.choice

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens

    def first_copy(self) -> tuple[int, int]:
        """Source and destination of what its first step copies: the last block that is partly cached."""
        assert self.copy_from is not None
        return self.copy_from, self.sequence.block_table[self.num_told_blocks]

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per prompt token (None for the first and for cached ones), once, for who tells them."""
        collected, self.prompt_logprobs = self.prompt_logprobs, None
        if collected is None:
            return None
        missing = self.sequence.num_prompt_tokens - len(collected)
        return (*(None,) * missing, *collected)

    def held(self, block_size: int) -> HeldSequence:
        """As the manager is to take it over; it counts as told with that."""
        sequence = self.sequence
        self.num_told_tokens = len(sequence.token_ids)
        self.num_told_blocks = sequence.num_computed_tokens // block_size
        return HeldSequence(
            sequence.choice,
            tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            tuple(sequence.block_table),
            sequence.num_computed_tokens,
            sequence.forks,
        )

    def untold_tokens(self, end: int) -> tuple[int, ...]:
        """Output tokens before position `end` that the manager does not know; from now on it does."""
        untold = tuple(self.sequence.token_ids[self.num_told_tokens : end])
        self.num_told_tokens = max(self.num_told_tokens, end)
        return untold

    def fork(self, choice: int) -> "RunningSequence":
        """A second owner of the same tokens and blocks, which the manager knows as far as it knows these."""
        parent = self.sequence
        child = Sequence(
            parent.start_id,
            choice,
            parent.sampling,
            parent.num_prompt_tokens,
            list(parent.token_ids),
            list(parent.block_table),
            parent.num_computed_tokens,
        )
        return RunningSequence(
            self.start,
            child,
            self.num_cached_tokens,
            self.num_final_tokens,
            self.num_told_tokens,
            self.num_told_blocks,
            self.prompt_logprobs,
            last_step=self.last_step,
        )


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One start: its sequences that have not ended, by choice."""

    start: Start
    sequences: dict[int, RunningSequence] = field(default_factory=dict)

    def held(self, block_size: int) -> HeldStart:
        """As the manager is to take it over."""
        start, sequences = self.start, tuple(each.held(block_size) for each in self.sequences.values())
        return HeldStart(start.start_id, start.request_id, start.attempt, start.token_endpoint, sequences)


def begin(start: Start, given: SequenceStart, block_size: int, max_model_len: int) -> RunningSequence:
    """The sequence that `given` describes; its table covers its tokens, one at least not cached."""
    token_ids = [*start.prompt_token_ids, *given.output_token_ids]
    num_prompt, num_given, num_cached = len(start.prompt_token_ids), len(token_ids), given.num_cached_tokens
    story = f"start {start.start_id} choice {given.choice}: {num_given} tokens, {num_cached} cached"
    assert 0 <= num_cached < num_given, f"{story}: at least one must be left to compute"
    assert (given.copy_from is None) == (num_cached % block_size == 0), f"{story}, from {given.copy_from}"
    assert len(given.block_table) == -(-num_given // block_size), f"{story}, {len(given.block_table)} blocks"
    wants_prompt_logprobs = start.sampling.prompt_logprobs is not None and not given.output_token_ids
    return RunningSequence(
        start,
        Sequence(
            start.start_id,
            given.choice,
            start.sampling,
            num_prompt,
            token_ids,
            [block_id for block_id, _ in given.block_table],
            num_cached,
            given.forks if start.sampling.beam is None else (),  # a search forks by what it finds
        ),
        num_cached_tokens=min(num_cached, num_prompt),
        num_final_tokens=min(num_prompt + start.sampling.max_tokens, max_model_len) - 1,
        num_told_tokens=num_given,
        num_told_blocks=num_cached // block_size,
        prompt_logprobs=[] if wants_prompt_logprobs else None,
        copy_from=None if given.copy_from is None else given.copy_from[0],
    )
