"""Beam search, naive: whole token lists, the whole vocabulary, sorted afresh at every step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_runner.stop_conditions import Finish
from kvmanager.protocol import BeamParams


class Found(NamedTuple):
    token_ids: tuple[int, ...]
    value: float
    score: float
    finish: Finish


def search(
    params: BeamParams,
    max_tokens: int,
    judge: Callable[[int, int], Finish],
    next_logprobs: Callable[[Sequence[int]], Sequence[float]],
) -> list[Found]:
    """The best ends. `next_logprobs(output so far)` is the model: one log-probability per token id."""
    width = params.width
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ends: list[Found] = []
    for length in range(1, max_tokens + 1):
        every = [
            (value + logprob, (*tokens, token))
            for value, tokens in live
            for token, logprob in enumerate(next_logprobs(tokens))
            if logprob > float("-inf")
        ]
        every.sort(key=lambda item: -item[0])
        for value, tokens in every[:width]:
            if (finish := judge(tokens[-1], length)).reason is not None:
                ends.append(Found(tokens, value, value / length**params.length_penalty, finish))
        ends.sort(key=lambda end: -end.score)
        del ends[width:]
        live = [item for item in every if judge(item[1][-1], length).reason is None][:width]
        if not live or (len(ends) == width and _enough(params, live[0][0], length, max_tokens, ends[-1])):
            break
    return ends


def _enough(params: BeamParams, best: float, length: int, max_tokens: int, worst: Found) -> bool:
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = max_tokens
    return best / length**params.length_penalty <= worst.score
