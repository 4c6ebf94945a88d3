"""Online softmax over a tile of 64 scores (arXiv 1805.02867): a running maximum and sum per row."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu.exponential import emit_exp, exp
from kernels.cpu.jit import intrinsic, jit
from kernels.cpu.memory import FLOAT, LANES, WORD, Pointer, emit_broadcast, lanes, splat

VECTORS = 4  # of scores per tile
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


@intrinsic
def online_softmax(typing_context: Any, scores: Any, low: Any, high: Any, maximum: Any, total: Any) -> Any:
    """scores ← exp(scores − maximum so far) in [low, high), 0 outside; update its maximum and sum.

    scores: 64 float32 at an address; maximum, total: addresses of one float32 each. Returns the factor by
    which what the row has summed up so far must be scaled. A row that has seen no key keeps the maximum −∞.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, low, high, maximum, total = arguments
        vector = lanes(FLOAT, LANES)
        base = builder.inttoptr(scores, vector.as_pointer())
        places = [builder.gep(base, [WORD(index)]) for index in range(VECTORS)]
        values = [
            emit_hide(builder, builder.load(place, align=4), low, high, LANES * index)
            for index, place in enumerate(places)
        ]
        maximum_place = builder.inttoptr(maximum, FLOAT.as_pointer())
        total_place = builder.inttoptr(total, FLOAT.as_pointer())
        before = builder.load(maximum_place)
        best = emit_maximum(builder, before, emit_reduce(builder, emit_maximum, values))
        builder.store(best, maximum_place)
        never = FLOAT(float("-inf"))
        finite = builder.select(builder.fcmp_ordered("oeq", best, never), FLOAT(0.0), best)
        shift = emit_broadcast(builder, finite)
        weights = [emit_exp(builder, builder.fsub(value, shift), LANES) for value in values]
        for place, weight in zip(places, weights, strict=True):
            builder.store(weight, place, align=4)
        factor = emit_exp(builder, builder.fsub(before, finite), 1)
        added = emit_reduce(builder, lambda builder, a, b: builder.fadd(a, b), weights)
        builder.store(builder.fadd(builder.fmul(builder.load(total_place), factor), added), total_place)
        return factor

    int64 = types.int64
    return types.float32(int64, int64, int64, int64, int64), codegen


def emit_hide(builder: Any, values: Any, low: Any, high: Any, first: int) -> Any:
    """−∞ in the lanes whose index (counted from `first`) is outside of [low, high)."""
    index = ir.Constant(lanes(WORD, LANES), [first + lane for lane in range(LANES)])
    above = builder.icmp_signed(">=", index, emit_broadcast(builder, builder.trunc(low, WORD)))
    below = builder.icmp_signed("<", index, emit_broadcast(builder, builder.trunc(high, WORD)))
    return builder.select(builder.and_(above, below), values, splat(FLOAT, float("-inf"), LANES))


def emit_maximum(builder: Any, first: Any, second: Any) -> Any:
    """The larger one, in every lane."""
    return builder.select(builder.fcmp_ordered("ogt", first, second), first, second)


def emit_reduce(builder: Any, combine: Any, vectors: list[Any]) -> Any:
    """All lanes of all vectors combined into one number, pairwise."""
    while len(vectors) > 1:
        vectors = [combine(builder, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    vector = vectors[0]
    distance = LANES // 2
    while distance:
        order = [(lane + distance) % LANES for lane in range(LANES)]
        mask = ir.Constant(lanes(WORD, LANES), order)
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, mask))
        distance //= 2
    return builder.extract_element(vector, WORD(0))
