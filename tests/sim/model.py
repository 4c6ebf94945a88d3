"""The simulator's model: its "KV" is the token history, so every read through a block table can be checked.

A cell of a block holds the chained hash of all tokens up to its position: what is right for one history is
wrong for every other. The next token is a function of that hash, the seed, the choice and the position.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from gpu_runner.beams import num_candidates
from gpu_runner.step import Candidate, Sampled, Scheduled, SequenceOutput, StepOutput, StepPlan
from gpu_runner.stop_conditions import Finish, finish
from kvmanager.protocol import Layout, SamplingParams
from tests.gpu_runner import beam_twin

BLOCK_SIZE: Final = 4
MAX_MODEL_LEN: Final = 80
VOCABULARY: Final = 40
EOS: Final = 0
LAYOUT: Final = Layout("simulated", "float32", BLOCK_SIZE, 1, 1, 1)

_MASK: Final = (1 << 64) - 1


def chained(history: int, token: int) -> int:
    """The hash of a history with one more token; 0 is the empty history."""
    return ((history ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK


def chain(tokens: Sequence[int], start: int = 0) -> list[int]:
    """What the cells of these tokens' positions hold."""
    hashes = []
    for token in tokens:
        start = chained(start, token)
        hashes.append(start)
    return hashes


def next_token(history: int, seed: int, choice: int, position: int) -> int:
    return crc32(b"%d,%d,%d,%d" % (history, seed, choice, position)) % VOCABULARY


def next_logprobs(history: int, seed: int) -> list[float]:
    """What the model thinks of every token, for beams; no two sums are equal but by a wonder."""
    drawn = (chained(chained(history ^ seed, token), token) for token in range(VOCABULARY))
    return [-4 * (value >> 11) / (1 << 53) for value in drawn]


class Text(NamedTuple):
    """What an undisturbed run gives for one choice."""

    tokens: list[int]
    finish_reason: str


def undisturbed(prompt: Sequence[int], choice: int, sampling: SamplingParams) -> Text:
    history = chain(prompt)[-1]
    tokens: list[int] = []
    while True:
        token = next_token(history, sampling.seed, choice, len(tokens))
        history = chained(history, token)
        tokens.append(token)
        if token == EOS and not sampling.ignore_eos:
            return Text(tokens, "stop")
        if len(tokens) == sampling.max_tokens:
            return Text(tokens, "length")


def searched(prompt: Sequence[int], sampling: SamplingParams) -> list[Text]:
    """What an undisturbed beam search gives, by the naive twin."""
    beam, start = sampling.beam, chain(prompt)[-1]
    assert beam is not None

    def judge(token: int, length: int) -> Finish:
        return finish(token, length, len(prompt) + length, sampling, frozenset({EOS}), MAX_MODEL_LEN)

    def after(output: Sequence[int]) -> list[float]:
        return next_logprobs(chain(output, start)[-1] if output else start, sampling.seed)

    longest = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
    ends = beam_twin.search(beam, longest, judge, after)
    texts = [Text(list(end.token_ids), end.finish.reason or "") for end in ends]
    return texts + [Text([], "length")] * (beam.width - len(texts))


MayWrite = Callable[[int], None]


class Engine:
    """Executes plans on `cells` (block → what its slots hold), which all runners share."""

    def __init__(self, cells: list[list[int]], may_write: MayWrite) -> None:
        self._cells = cells
        self._may_write = may_write

    def execute(self, plan: StepPlan) -> StepOutput:
        """All copies and writes come first, then the reads, as in a model's layer."""
        for source, destination in plan.copies:
            self._may_write(destination)
            self._cells[destination][:] = self._cells[source]
        for item in plan.scheduled:
            self._write(item)
        return StepOutput(tuple(self._read(item) for item in plan.scheduled))

    def _write(self, item: Scheduled) -> None:
        sequence, end = item.sequence, item.start + item.length
        known = sequence.extra.setdefault("chain", [])
        assert isinstance(known, list)
        known += chain(sequence.token_ids[len(known) : end], known[-1] if known else 0)
        table, written = sequence.block_table, -1
        for position in range(item.start, end):
            block = table[position // BLOCK_SIZE]
            if block != written:
                self._may_write(block)
                written = block
            self._cells[block][position % BLOCK_SIZE] = known[position]

    def _read(self, item: Scheduled) -> SequenceOutput:
        sequence, end = item.sequence, item.start + item.length
        known = sequence.extra["chain"]
        assert isinstance(known, list)
        for index in range(-(-end // BLOCK_SIZE)):
            first = index * BLOCK_SIZE
            right = known[first : min(first + BLOCK_SIZE, end)]
            block = sequence.block_table[index]
            assert self._cells[block][: len(right)] == right, (
                f"start {sequence.start_id} choice {sequence.choice} reads wrong tokens in block {block}, "
                f"entry {index} of its table {sequence.block_table}, {end} tokens"
            )
        if sequence.sampling.beam is not None:
            return SequenceOutput((), candidates=_candidates(item, known[end - 1]))
        num_output = end - sequence.num_prompt_tokens
        return SequenceOutput(
            tuple(
                Sampled(choice, next_token(known[end - 1], sequence.sampling.seed, choice, num_output))
                for choice in item.sample_choices
            )
        )


def _candidates(item: Scheduled, history: int) -> tuple[Candidate, ...]:
    """A beam's, no more than the executor gives."""
    if not item.sample_choices:
        return ()
    sampling = item.sequence.sampling
    offers = [Candidate(*pair) for pair in enumerate(next_logprobs(history, sampling.seed))]
    offers.sort(key=lambda offer: -offer.logprob)
    return tuple(offers[: num_candidates(sampling, {EOS})])
