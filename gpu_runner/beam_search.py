"""Beam search as transformers has it, decided on plain numbers: no torch, no sequences, no blocks.

A path is the prompt followed by some tokens; its value is the sum of their log-probabilities. At every step
each live path is offered its likeliest next tokens. Of all these continuations, those among the `width` best
that stop (at a stop token or at a limit) are ends, and the `width` best that do not stop live on. An end's
score is its value divided by length ** length_penalty; the `width` ends of the best scores are kept.

The search is over when nothing can live on, or when there are `width` ends and, by `early_stopping`:
    True     at once;
    False    when the best live path, were it to stop here, would not beat the worst end;
    "never"  the same, but with a positive length_penalty the path counts as if it had reached the greatest
             length without losing more (so that no possible end is missed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from gpu_runner.step import Candidate
from gpu_runner.stop_conditions import Finish
from kvmanager.protocol import BeamParams, BeamPath, SearchState

NO_SCORE = -1e9
"""Score of an end that does not exist: a vocabulary smaller than the width gives fewer ends."""

Judge = Callable[[int, int], Finish]
"""(token id, number of output tokens with it) → whether a path stops there."""


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A path's last token and the path before it, so that paths share what they have in common."""

    before: "Path | None"  # None for the prompt alone
    last: Candidate
    value: float
    length: int  # tokens after the prompt

    def candidates(self) -> list[Candidate]:
        """Its tokens in order."""
        found = []
        path: Path = self
        while path.before is not None:
            found.append(path.last)
            path = path.before
        return found[::-1]


PROMPT = Path(None, Candidate(-1, 0.0), 0.0, 0)


class End(NamedTuple):
    """A path that has stopped."""

    path: Path
    score: float
    finish: Finish


NO_END = End(PROMPT, NO_SCORE, Finish("length"))


class Survivor(NamedTuple):
    """A live path: that at `place` before the step, with one token more."""

    place: int
    token_id: int


class BeamSearch:
    """One search. `max_tokens` is the length at which every path stops, by `judge` too. It begins with the
    prompt, or goes on from the `state` of another one.
    """

    def __init__(
        self, params: BeamParams, max_tokens: int, judge: Judge, state: SearchState | None = None
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._judge = judge
        self._live = [PROMPT] if state is None else [_path(beam) for beam in state.beams]
        self._ends: list[End] = []  # best first
        for end in state.ends if state is not None else ():
            self._ends.append(self._end(_path(end), Finish(end.finish_reason, end.stop_reason)))

    def state(self) -> SearchState:
        """Where it stands, to go on from there."""
        beams = tuple([_told(path, Finish(None)) for path in self._live])
        return SearchState(beams, tuple([_told(end.path, end.finish) for end in self._ends]))

    def ends(self) -> list[End]:
        """The `width` best ends, best first."""
        return self._ends + [NO_END] * (self._params.width - len(self._ends))

    def advance(self, offers: Sequence[Sequence[Candidate]]) -> list[Survivor]:
        """One step: `offers[i]` are for live path i. Returns the paths that live on, best first; with none,
        the search is over.

        An offer holds at least the `width` likeliest tokens and the `width` likeliest that do not stop.
        """
        assert len(offers) == len(self._live), f"{len(offers)} offers for {len(self._live)} paths"
        width = self._params.width
        places: list[int] = []
        live: list[Path] = []
        for rank, (place, path) in enumerate(self._continuations(offers)):
            verdict = self._judge(path.last.token_id, path.length)
            if verdict.reason is None:
                places.append(place)
                live.append(path)
            elif rank < width:
                self._ends.append(self._end(path, verdict))
            if len(live) == width and rank + 1 >= width:
                break
        self._ends = sorted(self._ends, key=_score, reverse=True)[:width]
        self._live = [] if self._is_over(live) else live
        return [Survivor(place, path.last.token_id) for place, path in zip(places, self._live, strict=False)]

    def _end(self, path: Path, finish: Finish) -> End:
        return End(path, path.value / _weight(path.length, self._params), finish)

    def _continuations(self, offers: Sequence[Sequence[Candidate]]) -> list[tuple[int, Path]]:
        """All of them with their paths' places, best first; equal ones by place, then token."""
        found = [
            (place, Path(path, candidate, path.value + candidate.logprob, path.length + 1))
            for place, (path, offer) in enumerate(zip(self._live, offers, strict=True))
            for candidate in offer
        ]
        return sorted(found, key=lambda item: (-item[1].value, item[0], item[1].last.token_id))

    def _is_over(self, live: list[Path]) -> bool:
        params = self._params
        if not live:
            return True
        if len(self._ends) < params.width:
            return False
        if params.early_stopping is True:
            return True
        to_the_limit = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if to_the_limit else live[0].length
        return live[0].value / _weight(length, params) <= self._ends[-1].score


def _weight(length: int, params: BeamParams) -> float:
    return float(length**params.length_penalty)


def _told(path: Path, finish: Finish) -> BeamPath:
    tokens = path.candidates()
    logprobs = tuple([token.logprobs for token in tokens if token.logprobs is not None])
    return BeamPath(tuple([token.token_id for token in tokens]), path.value, logprobs or None, *finish)


def _path(told: BeamPath) -> Path:
    path = PROMPT
    for token_id, entry in zip(told.token_ids, told.logprobs or repeat(None), strict=False):
        path = Path(path, Candidate(token_id, 0.0, entry), told.cumulative_logprob, path.length + 1)
    return path


def _score(end: End) -> float:
    return end.score
