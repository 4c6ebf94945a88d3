"""Online softmax over a tile of scores (arXiv 1805.02867): a running maximum and sum per row."""

from typing import Any

import numpy as np
from numba import types

from kernels.cpu.exponential import emit_exp, exp
from kernels.cpu.jit import cgutils, intrinsic, jit
from kernels.cpu.memory import FLOAT, LANES, WORD, Pointer, emit_broadcast, emit_shuffle, lanes, splat

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
def hide(scores: Pointer, low: int, high: int, count: int) -> None:
    """scores ← −∞ outside of [low, high)."""
    for i in range(min(low, count)):
        scores[i] = NEVER
    for i in range(max(high, 0), count):
        scores[i] = NEVER


@intrinsic
def online_softmax(typing_context: Any, scores: Any, vectors: Any, maximum: Any, total: Any) -> Any:
    """scores ← exp(scores − maximum so far); update its maximum and sum.

    scores: 16 · `vectors` float32 at an address; maximum, total: addresses of one float32 each. Returns the
    factor by which what the row has summed up so far must be scaled. A row that has seen no key keeps the
    maximum −∞.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, vectors, maximum, total = arguments
        vector = lanes(FLOAT, LANES)
        base = builder.inttoptr(scores, vector.as_pointer())
        maximum_place = builder.inttoptr(maximum, FLOAT.as_pointer())
        total_place = builder.inttoptr(total, FLOAT.as_pointer())
        never = FLOAT(float("-inf"))
        largest = cgutils.alloca_once_value(builder, splat(FLOAT, float("-inf"), LANES))
        with cgutils.for_range(builder, vectors) as loop:
            value = builder.load(builder.gep(base, [loop.index]), align=4)
            builder.store(emit_maximum(builder, value, builder.load(largest)), largest)
        before = builder.load(maximum_place)
        best = emit_maximum(builder, before, emit_reduce(builder, emit_maximum, builder.load(largest)))
        builder.store(best, maximum_place)
        finite = builder.select(builder.fcmp_ordered("oeq", best, never), FLOAT(0.0), best)
        shift = emit_broadcast(builder, finite)
        added = cgutils.alloca_once_value(builder, splat(FLOAT, 0.0, LANES))
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.gep(base, [loop.index])
            weight = emit_exp(builder, builder.fsub(builder.load(place, align=4), shift), LANES)
            builder.store(weight, place, align=4)
            builder.store(builder.fadd(builder.load(added), weight), added)
        factor = emit_exp(builder, builder.fsub(before, finite), 1)
        weights = emit_reduce(builder, lambda builder, a, b: builder.fadd(a, b), builder.load(added))
        builder.store(builder.fadd(builder.fmul(builder.load(total_place), factor), weights), total_place)
        return factor

    return types.float32(*[types.int64] * 4), codegen


def emit_maximum(builder: Any, first: Any, second: Any) -> Any:
    """The larger one, in every lane."""
    return builder.select(builder.fcmp_ordered("ogt", first, second), first, second)


def emit_reduce(builder: Any, combine: Any, vector: Any) -> Any:
    """All lanes of a vector combined into one number, pairwise."""
    distance = LANES // 2
    while distance:
        order = [(lane + distance) % LANES for lane in range(LANES)]
        vector = combine(builder, vector, emit_shuffle(builder, vector, vector, order))
        distance //= 2
    return builder.extract_element(vector, WORD(0))
