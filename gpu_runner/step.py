"""What a step is: the plan that the scheduler makes, and the output that the executor returns for it.

The scheduler (pure) decides which sequences get which tokens; the executor (torch) computes them. These types
are all that the two know of each other.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvmanager.protocol import SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream of a running request. The runner is the only writer of its tail and of its table."""

    start_id: int
    choice: int
    sampling: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]  # prompt + output
    block_table: list[int]  # logical index → block_id
    num_computed_tokens: int  # tokens whose KV is in the blocks
    forks: tuple[int, ...] = ()  # choices to fork off once all given tokens are computed
    extra: dict[str, object] = field(default_factory=dict)  # the executor's own notes


@dataclass(slots=True, frozen=True)
class Scheduled:
    """Tokens [start, start + length) of `sequence` are computed in this step.

    `sample_choices` is empty for a chunk that does not reach the end of the known tokens; else it names the
    choices for which a next token is drawn from the last position's logits (its own, then its forks).
    """

    sequence: Sequence
    start: int
    length: int
    sample_choices: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One step: first `copies` (source block, new block), then decodes, then prefill chunks."""

    scheduled: tuple[Scheduled, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.scheduled)


@dataclass(slots=True, frozen=True)
class Sampled:
    """The next token of one choice, with log-probabilities where its request wants them."""

    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Candidate(NamedTuple):
    """A token that could be next. `logprob` counts for the search: it includes bias and penalties."""

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None = None  # where the request wants them


@dataclass(slots=True, frozen=True)
class SequenceOutput:
    """The result for one `Scheduled`, in the plan's order.

    A beam has nothing `sampled`, but `candidates`: its likeliest tokens, at least `width` that do not stop it
    and, of all tokens, the `width` likeliest (fewer where the vocabulary has fewer).

    `prompt_logprobs` has one entry per computed prompt position p in [start, start + length): that of token
    p + 1 given the tokens up to p; positions whose successor is not a prompt token are left out.
    """

    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[Candidate, ...] = ()


@dataclass(slots=True, frozen=True)
class StepOutput:
    outputs: tuple[SequenceOutput, ...]
