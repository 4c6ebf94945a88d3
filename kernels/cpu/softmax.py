"""Online softmax over a tile of scores (arXiv 1805.02867): a running maximum and sum per row."""

from typing import Any

import numpy as np

from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit
from kernels.cpu.memory import Pointer

# float32, so that numba computes in float32 (a Python number would make it float64)
NEVER: Any = np.float32(-np.inf)
ZERO: Any = np.float32(0)
ONE: Any = np.float32(1)
TWO: Any = np.float32(2)


@jit
def cap_scores(scores: Pointer, count: int, soft_cap: Any) -> None:
    """scores ← cap · tanh(scores / cap), with tanh(y) = 1 − 2 / (exp(2y) + 1)."""
    twice = TWO / soft_cap
    for i in range(count):
        scores[i] = soft_cap * (ONE - TWO / (exp(scores[i] * twice) + ONE))


@jit
def hide_scores(scores: Pointer, low: int, high: int, count: int) -> None:
    """scores ← −∞ outside of [low, high)."""
    for i in range(count):
        if i < low or i >= high:
            scores[i] = NEVER


@jit
def online_softmax(scores: Pointer, count: int, maxima: Pointer, sums: Pointer, row: int) -> Any:
    """scores ← exp(scores − maximum so far); update the row's maximum and sum.

    Returns the factor by which what the row has summed up so far must be scaled.
    """
    before = maxima[row]
    best = before
    for i in range(count):
        best = scores[i] if scores[i] > best else best
    if best == NEVER:  # every key so far is hidden from this row
        for i in range(count):
            scores[i] = ZERO
        return ONE
    total = ZERO
    for i in range(count):
        weight = exp(scores[i] - best)
        scores[i] = weight
        total += weight
    factor = exp(before - best)
    sums[row] = sums[row] * factor + total
    maxima[row] = best
    return factor
