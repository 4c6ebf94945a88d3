"""The decision of beam search: by example, then against a naive twin."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.beam_search import NO_SCORE, BeamSearch, Judge, Survivor
from gpu_runner.step import Candidate
from gpu_runner.stop_conditions import Finish
from kvmanager.protocol import BeamParams, SearchState, TokenLogprobs
from tests.gpu_runner.beam_twin import search

EOS = 0
STOP, LENGTH, ON = Finish("stop"), Finish("length"), Finish(None)


def judge_at(max_tokens: int, stops: frozenset[int] = frozenset({EOS})) -> Judge:
    return lambda token, length: STOP if token in stops else LENGTH if length >= max_tokens else ON


def offer(**logprobs: float) -> list[Candidate]:
    """`t3=-0.5` is token 3."""
    found = [Candidate(int(name[1:]), value) for name, value in logprobs.items()]
    return sorted(found, key=lambda item: -item.logprob)


def test_the_first_step_takes_the_best_tokens_of_the_prompt() -> None:
    search_ = BeamSearch(BeamParams(2), 5, judge_at(5))
    assert search_.advance([offer(t3=-1.0, t4=-0.5, t5=-2.0)]) == [Survivor(0, 4), Survivor(0, 3)]


def test_one_path_may_take_all_places() -> None:
    search_ = BeamSearch(BeamParams(2), 5, judge_at(5))
    search_.advance([offer(t3=-1.0, t4=-5.0)])
    assert search_.advance([offer(t1=-0.5, t2=-0.6), offer(t1=-0.1, t2=-0.2)]) == [
        Survivor(0, 1),
        Survivor(0, 2),
    ]


def test_a_stop_beyond_the_width_is_no_end_and_the_next_best_live_on() -> None:
    search_ = BeamSearch(BeamParams(2, early_stopping=True), 5, judge_at(5))
    assert search_.advance([offer(t1=-0.1, t2=-0.2, t0=-0.3, t3=-0.4)]) == [Survivor(0, 1), Survivor(0, 2)]
    assert search_.advance([offer(t0=-0.1, t1=-0.3), offer(t0=-0.1, t2=-0.4)]) == []
    assert [[c.token_id for c in end.path.candidates()] for end in search_.ends()] == [[1, 0], [2, 0]]
    assert [end.score for end in search_.ends()] == [pytest.approx(-0.1), pytest.approx(-0.15)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "over"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True), (False, -1.0, True)],
)
def test_when_the_search_is_over(early_stopping: Any, length_penalty: float, over: bool) -> None:
    """The live path has lost 1.2 after one token, the end 1: it wins only if a length of ten counts."""
    search_ = BeamSearch(BeamParams(1, length_penalty, early_stopping), 10, judge_at(10))
    live = search_.advance([offer(t0=-1.0, t1=-1.2)])
    assert (live == []) is over


def test_at_the_greatest_length_the_best_paths_are_ends() -> None:
    search_ = BeamSearch(BeamParams(2), 1, judge_at(1))
    assert search_.advance([offer(t1=-0.1, t0=-0.2, t3=-0.3)]) == []
    assert [end.finish for end in search_.ends()] == [LENGTH, STOP]


def test_a_vocabulary_smaller_than_the_width_leaves_ends_that_are_none() -> None:
    search_ = BeamSearch(BeamParams(3), 1, judge_at(1))
    search_.advance([offer(t1=-0.1, t2=-0.2)])
    assert [end.score for end in search_.ends()] == [-0.1, -0.2, NO_SCORE]
    assert search_.ends()[2].path.candidates() == []


@given(
    seed=st.integers(0, 1 << 30),
    width=st.integers(1, 6),
    length_penalty=st.sampled_from((-1.0, 0.0, 0.6, 1.0, 2.0)),
    early_stopping=st.sampled_from((False, True, "never")),
    max_tokens=st.integers(1, 12),
    vocabulary=st.integers(8, 20),
    stops=st.frozensets(st.integers(0, 1), max_size=2),
    spread=st.sampled_from((1, 100)),
    handed_over=st.frozensets(st.integers(1, 11)),
)
def test_as_its_twin(
    seed: int,
    width: int,
    length_penalty: float,
    early_stopping: bool,
    max_tokens: int,
    vocabulary: int,
    stops: frozenset[int],
    spread: int,
    handed_over: frozenset[int],
) -> None:
    """With candidates cut to what the executor gives, the twin sees the whole vocabulary. At some lengths
    another search goes on from its state.
    """

    def next_logprobs(output: Sequence[int]) -> list[float]:
        raw = [zlib.crc32(bytes([*output, token]), seed) / 2**32 / spread for token in range(vocabulary)]
        total = math.log(sum(math.exp(value) for value in raw))
        return [value - total for value in raw]

    params, judge = BeamParams(width, length_penalty, early_stopping), judge_at(max_tokens, stops)
    search_ = BeamSearch(params, max_tokens, judge)
    outputs: list[tuple[int, ...]] = [()]
    while outputs:
        offers = [
            sorted(
                (
                    Candidate(token, value, TokenLogprobs(value, token, ()))
                    for token, value in enumerate(next_logprobs(output))
                ),
                key=lambda c: -c.logprob,
            )
            for output in outputs
        ]
        live = search_.advance([candidates[: width + len(stops)] for candidates in offers])
        outputs = [(*outputs[place], token) for place, token in live]
        if outputs and len(outputs[0]) in handed_over:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(search_.state()), type=SearchState)
            search_ = BeamSearch(params, max_tokens, judge, state)
    for end in search_.ends():
        assert all(c.logprobs and c.logprobs.rank == c.token_id for c in end.path.candidates())
    found = [
        (tuple(c.token_id for c in end.path.candidates()), end.path.value, end.score, end.finish)
        for end in search_.ends()
    ]
    assert found == search(params, max_tokens, judge, next_logprobs)
