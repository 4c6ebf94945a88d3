"""From logits to tokens: greedy rows by one argmax, the others by `choose`, log-probabilities where wanted.

Only rows that ask for something pay for it: a row without temperature, bias and penalties is never copied.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_runner.choose import choose_rows
from gpu_runner.logits import change, needs_change
from gpu_runner.logprobs import token_logprobs
from gpu_runner.random_numbers import uniform
from gpu_runner.step import Sampled, Sequence

COLDEST = 1e-20  # a lower temperature chooses nothing else, and would make float32 logits infinite


@dataclass(slots=True, frozen=True)
class Draw:
    """One token to choose: for `choice` of a sequence (or of a fork of it), from row `row` of the logits."""

    row: int
    sequence: Sequence
    choice: int


def sample(logits: Tensor, draws: list[Draw], eos_token_ids: tuple[int, ...]) -> list[Sampled]:
    """The next token of every draw, in order; `logits` `[rows, vocab]` are left as they were."""
    tokens = [0] * len(draws)
    plain = [place for place, draw in enumerate(draws) if _is_plain(draw)]
    others = [place for place, draw in enumerate(draws) if not _is_plain(draw)]
    if plain:
        best = greedy(logits)
        for place in plain:
            tokens[place] = best[draws[place].row]
    if others:
        chosen = _choose(logits, [draws[place] for place in others], eos_token_ids)
        for place, token in zip(others, chosen, strict=True):
            tokens[place] = token
    return _with_logprobs(logits, draws, tokens)


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row; of equal ones the lowest id."""
    if logits.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's there
        return logits.float().numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]
    return logits.argmax(dim=-1).tolist()


def _is_plain(draw: Draw) -> bool:
    return draw.sequence.sampling.temperature == 0 and not needs_change(draw.sequence)


def _choose(logits: Tensor, draws: list[Draw], eos_token_ids: tuple[int, ...]) -> list[int]:
    """Tokens for draws with a temperature or with changed logits, in float32 on the CPU."""
    rows = logits[[draw.row for draw in draws]].float().cpu()
    for row, draw in zip(rows, draws, strict=True):
        if needs_change(draw.sequence):
            change(row, draw.sequence, eos_token_ids)
    tokens: list[int] = greedy(rows) if any(_is_greedy(draw) for draw in draws) else [0] * len(draws)
    random = [place for place, draw in enumerate(draws) if not _is_greedy(draw)]
    if random:
        picked = rows if len(random) == len(draws) else rows[random]
        for place, token in zip(
            random, _choose_random(picked, [draws[place] for place in random]), strict=True
        ):
            tokens[place] = token
    return tokens


def _is_greedy(draw: Draw) -> bool:
    return draw.sequence.sampling.temperature == 0


def _choose_random(rows: Tensor, draws: list[Draw]) -> list[int]:
    """One token per row, drawn with the row's own parameters; `rows` are used up."""
    params = [draw.sequence.sampling for draw in draws]
    rows /= torch.tensor([max(item.temperature, COLDEST) for item in params])[:, None]
    tokens = np.empty(len(draws), np.int64)
    choose_rows(
        torch.softmax(rows, dim=-1).numpy(),
        np.array([min(item.top_k, rows.shape[1]) for item in params], np.int64),  # it may exceed 64 bits
        np.array([item.top_p for item in params], np.float64),
        np.array([item.min_p for item in params], np.float64),
        np.array([_uniform(draw) for draw in draws], np.float64),
        tokens,
    )
    return tokens.tolist()


def _uniform(draw: Draw) -> float:
    sequence = draw.sequence
    return uniform(sequence.sampling.seed, draw.choice, len(sequence.token_ids) - sequence.num_prompt_tokens)


def _with_logprobs(logits: Tensor, draws: list[Draw], tokens: list[int]) -> list[Sampled]:
    wanted = [place for place, draw in enumerate(draws) if draw.sequence.sampling.logprobs is not None]
    found = {}
    if wanted:
        found_list = token_logprobs(
            logits[[draws[place].row for place in wanted]],
            [tokens[place] for place in wanted],
            [draws[place].sequence.sampling.logprobs or 0 for place in wanted],
        )
        found = dict(zip(wanted, found_list, strict=True))
    return [Sampled(draw.choice, tokens[place], found.get(place)) for place, draw in enumerate(draws)]
