"""A running request's beam search: which of its sequences go on, fork or are dropped after a step.

Every live path of the search is a running sequence. All decide together, once each has computed its newest
token; one that sat a step out (for want of a credit) is waited for. Choice 0 runs the prompt.

Where a block of output is full, the frontend is told where the search stands, so that after this runner's
death another one goes on from there.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple

from gpu_runner.beam_search import BeamSearch, End
from gpu_runner.request import RunningSequence
from gpu_runner.step import Candidate
from gpu_runner.stop_conditions import Finish, finish
from kvmanager.protocol import (
    BeamParams,
    BeamScore,
    SamplingParams,
    SearchState,
    Start,
    TokenEvent,
    TokenLogprobs,
)

MAX_TOLD: Final = 1 << 17
"""Of a search that stands at more tokens than this, its ends and the alternatives of their log-probabilities
counted as well, nobody is told: reading such a message would hold up others for tens of milliseconds.
"""


class Move(NamedTuple):
    """What becomes of the sequence `choice`: it takes the first of `token_ids`, and each of `children`,
    forked off before that, one of the others. Without any token it is dropped.
    """

    choice: int
    children: tuple[int, ...]
    token_ids: tuple[int, ...]


class Beams:
    """One request's search, and the sequences that are its live paths."""

    def __init__(
        self, start: Start, params: BeamParams, eos_token_ids: Collection[int], max_model_len: int
    ) -> None:
        sampling, num_prompt = start.sampling, len(start.prompt_token_ids)

        def judge(token_id: int, length: int) -> Finish:
            return finish(token_id, length, num_prompt + length, sampling, eos_token_ids, max_model_len)

        self._width = params.width
        self._start = start
        max_tokens = min(sampling.max_tokens, max_model_len - num_prompt)
        self._search = BeamSearch(params, max_tokens, judge, start.search)
        self._choices = [each.choice for each in start.sequences]  # of each live path, in the search's order
        self._offers: dict[int, tuple[Candidate, ...]] = {}

    @property
    def over(self) -> bool:
        return not self._choices

    def offer(self, choice: int, candidates: tuple[Candidate, ...]) -> bool:
        """The sequence has computed its newest token; whether all have now, so that `decide` is due."""
        self._offers[choice] = candidates
        return len(self._offers) == len(self._choices)

    def decide(self) -> list[Move]:
        """What every sequence does next; none does anything once the search is over."""
        choices, offers = self._choices, self._offers
        survivors = self._search.advance([offers[choice] for choice in choices])
        unused = iter(sorted(set(range(2 * self._width)) - set(choices)))
        taken: dict[int, list[tuple[int, int]]] = {choice: [] for choice in choices}
        self._choices, self._offers = [], {}
        for place, token_id in survivors:
            parent = choices[place]
            choice = next(unused) if taken[parent] else parent
            taken[parent].append((choice, token_id))
            self._choices.append(choice)
        return [_move(parent, successors) for parent, successors in taken.items()]

    def state(self, num_output_tokens: int) -> SearchState | None:
        """Where the search stands, with beams of that length; None if it cannot be told."""
        paths = 2 * self._width  # beams, and as many ends at most
        size = paths * num_output_tokens * (1 + (self._start.sampling.logprobs or 0))
        known = num_output_tokens > 0 and len(self._choices) == self._width
        return self._search.state() if known and size <= MAX_TOLD else None

    def results(
        self, num_cached_tokens: int, prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    ) -> list[TokenEvent]:
        """Every choice whole, best first; to be called when the search is over."""
        assert self.over
        events = []
        for choice, end in enumerate(self._search.ends()):
            events.append(self._event(choice, end, num_cached_tokens, prompt_logprobs))
            prompt_logprobs = None
        return events

    def _event(
        self,
        choice: int,
        end: End,
        num_cached_tokens: int,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    ) -> TokenEvent:
        start, tokens = self._start, end.path.candidates()
        return TokenEvent(
            start.request_id,
            start.attempt,
            choice,
            0,
            tuple(token.token_id for token in tokens),
            num_cached_tokens,
            None if start.sampling.logprobs is None else tuple(t.logprobs for t in tokens if t.logprobs),
            prompt_logprobs,
            end.finish.reason,
            end.finish.stop_reason,
            BeamScore(end.path.value, end.score),
        )


def _move(choice: int, successors: list[tuple[int, int]]) -> Move:
    children = tuple(child for child, _ in successors[1:])
    return Move(choice, children, tuple(token_id for _, token_id in successors))


def num_candidates(sampling: SamplingParams, eos_token_ids: Collection[int]) -> int:
    """How many of a beam's likeliest tokens the search must see: `width` beside all that may stop it."""
    assert sampling.beam is not None
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    return sampling.beam.width + len(stops)


def count_needs(
    needs: Counter[int], beams: Collection[RunningSequence], block_size: int, budget: int
) -> None:
    """Add what a search may need to `needs` (steps after the planned one → blocks).

    After any step all beams may be forks of one: then each takes a block, or all but one copy a tail.
    """
    steps = num_tokens = num_final = width = 0
    for running in beams:
        assert running.start.sampling.beam is not None
        width = running.start.sampling.beam.width
        left = running.num_uncomputed_tokens - running.planned
        steps = max(steps, -(-left // budget))
        num_tokens, num_final = len(running.sequence.token_ids), running.num_final_tokens
        if left and num_tokens > len(running.sequence.block_table) * block_size:
            needs[0] += 1  # it sat out
    for distance in range(2):
        if num_tokens + distance < num_final:
            at_a_boundary = (num_tokens + distance) % block_size == 0
            if blocks := width if at_a_boundary else width - 1:
                needs[steps + distance] += blocks
