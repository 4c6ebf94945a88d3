"""Online softmax over a tile of scores (arXiv 1805.02867): a running maximum and sum per row."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from kernels.cpu.exponential import emit_exp, tanh
from kernels.cpu.jit import Emitter, cgutils, intrinsic, jit
from kernels.cpu.memory import FLOAT, LANES, WORD, Pointer, emit_broadcast, emit_shuffle, lanes, splat

# float32, so that numba computes in float32 (a Python number would make it float64)
NEVER: Any = np.float32(-np.inf)
ZERO: Any = np.float32(0)


@jit
def cap_scores(scores: Pointer, count: int, soft_cap: Any) -> None:
    """scores ← cap · tanh(scores / cap)."""
    for i in range(count):
        scores[i] = soft_cap * tanh(scores[i] / soft_cap)


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
        base = builder.inttoptr(scores, lanes(FLOAT, LANES).as_pointer())
        maximum_place = builder.inttoptr(maximum, FLOAT.as_pointer())
        total_place = builder.inttoptr(total, FLOAT.as_pointer())
        never = FLOAT(float("-inf"))

        def score(index: Any) -> Any:
            return builder.load(builder.gep(base, [index]), align=4)

        largest = emit_combined(builder, vectors, emit_maximum, float("-inf"), score)
        before = builder.load(maximum_place)
        best = emit_maximum(builder, before, emit_reduce(builder, emit_maximum, largest))
        builder.store(best, maximum_place)
        finite = builder.select(builder.fcmp_ordered("oeq", best, never), FLOAT(0.0), best)
        shift = emit_broadcast(builder, finite)

        def weight(index: Any) -> Any:
            value = emit_exp(builder, builder.fsub(score(index), shift), LANES)
            builder.store(value, builder.gep(base, [index]), align=4)
            return value

        weights = emit_reduce(builder, emit_sum, emit_combined(builder, vectors, emit_sum, 0.0, weight))
        factor = emit_exp(builder, builder.fsub(before, finite), 1)
        builder.store(builder.fadd(builder.fmul(builder.load(total_place), factor), weights), total_place)
        return factor

    return types.float32(*[types.int64] * 4), codegen


def emit_combined(
    builder: Any, count: Any, combine: Emitter, start: float, make: Callable[[Any], Any]
) -> Any:
    """`start` and make(0) … make(count − 1) combined, in two chains: one would be waiting for itself."""
    chains = [cgutils.alloca_once_value(builder, splat(FLOAT, start, LANES)) for _ in range(2)]

    def take(chain: Any, index: Any) -> None:
        builder.store(combine(builder, make(index), builder.load(chain)), chain)

    odd = builder.and_(count, count.type(1))
    even = builder.sub(count, odd)
    with cgutils.for_range_slice(builder, count.type(0), even, count.type(2), inc=True) as (index, _):
        take(chains[0], index)
        take(chains[1], builder.add(index, index.type(1)))
    with builder.if_then(builder.icmp_unsigned("!=", odd, odd.type(0))):
        take(chains[0], even)
    return combine(builder, *map(builder.load, chains))


def emit_sum(builder: Any, first: Any, second: Any) -> Any:
    """The sum, in every lane."""
    return builder.fadd(first, second)


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
