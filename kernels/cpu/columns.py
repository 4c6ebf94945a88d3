"""The order in which attention keeps columns in scratch, and rows copied into scratch and out of it.

A vector of 32 bfloat16 becomes two vectors of float32 with one instruction each, if one takes the even
columns and the other one the odd ones; in the order of memory it takes two each, half of them on the one unit
that moves lanes about. So with a bfloat16 cache queries and sums lie in *pair order*: of every 32 columns
first the 16 even ones, then the 16 odd ones. Other caches, and columns past the last 32, keep their order.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.jit import cgutils, intrinsic, jit
from kernels.cpu.memory import (
    BITS,
    LANES,
    Kind,
    emit_bits_pair,
    emit_broadcast,
    emit_load,
    emit_shuffle,
    emit_store,
)

INT64 = ir.IntType(64)
PAIR = 2 * LANES  # columns
TO_PAIRS = [[2 * lane + odd for lane in range(LANES)] for odd in (0, 1)]
FROM_PAIRS = [[lane // 2 + lane % 2 * LANES for lane in range(first, first + LANES)] for first in (0, LANES)]


def in_pairs(kind: Any) -> bool:
    """Whether rows of a cache of this kind are read in pair order."""
    return bool(kind == types.uint16)


def emit_load_columns(builder: Any, kind: Any, pointer: Any, vectors: int) -> list[Any]:
    """Read vectors of a row of the cache as float32: one as it lies, several in the cache's order."""
    places = [builder.gep(pointer, [INT64(vector * LANES)]) for vector in range(vectors)]
    if vectors == 1 or not in_pairs(kind):
        return [emit_load(builder, kind, place, LANES) for place in places]
    return [half for place in places[::2] for half in emit_bits_pair(builder, kind, place)]


@intrinsic
def take_row(
    typing_context: Any, order: Any, kind: Any, source: Any, result: Any, depth: Any, factor: Any
) -> Any:
    """result = factor · source, `depth` elements of `kind` → float32 in the order of cache kind `order`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shuffles = TO_PAIRS if in_pairs(order) else None
        emit_scaled_row(builder, kind, types.float32, shuffles, *arguments[2:])
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(order, kind, int64, int64, int64, types.float32), codegen


@intrinsic
def give_row(
    typing_context: Any, order: Any, kind: Any, source: Any, result: Any, depth: Any, factor: Any
) -> Any:
    """result = factor · source, float32 in the order of cache kind `order` → `depth` elements of `kind`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shuffles = FROM_PAIRS if in_pairs(order) else None
        emit_scaled_row(builder, types.float32, kind, shuffles, *arguments[2:])
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(order, kind, int64, int64, int64, types.float32), codegen


def emit_scaled_row(
    builder: Any,
    source_kind: Any,
    result_kind: Any,
    shuffles: list[list[int]] | None,
    source: Any,
    result: Any,
    depth: Any,
    factor: Any,
) -> None:
    """result = factor · source; `shuffles` says how two vectors become two in another order."""
    scale = emit_broadcast(builder, factor)

    def copy(column: Any, vectors: int) -> None:
        values = emit_vectors(builder, source_kind, source, column, vectors)
        if shuffles and vectors > 1:
            values = [
                emit_shuffle(builder, values[first], values[first + 1], lanes)
                for first in range(0, vectors, 2)
                for lanes in shuffles
            ]
        values = [builder.fmul(value, scale) for value in values]
        emit_put(builder, result_kind, result, column, values)

    emit_over_columns(builder, depth, copy)


def emit_over_columns(builder: Any, depth: Any, copy: Callable[[Any, int], None]) -> None:
    """copy(column, vectors) for 4 vectors at a time, then for the 2 and the 1 that may be left."""
    start = INT64(0)
    for vectors in (4, 2, 1):
        width = vectors * LANES
        end = builder.and_(depth, INT64(-width))
        with cgutils.for_range_slice(builder, start, end, INT64(width), inc=True) as (column, _):
            copy(column, vectors)
        start = end


def emit_vectors(builder: Any, kind: Any, address: Any, column: Any, vectors: int) -> list[Any]:
    """Read neighbouring vectors of a row."""
    places = emit_places(builder, kind, address, column, vectors)
    return [emit_load(builder, kind, place, LANES) for place in places]


def emit_put(builder: Any, kind: Any, address: Any, column: Any, values: list[Any]) -> None:
    """Write neighbouring vectors of a row."""
    places = emit_places(builder, kind, address, column, len(values))
    for place, value in zip(places, values, strict=True):
        emit_store(builder, kind, place, value, LANES)


def emit_places(builder: Any, kind: Any, address: Any, column: Any, vectors: int) -> list[Any]:
    """Pointers to the elements at which the vectors from `column` on start."""
    row = builder.inttoptr(address, BITS[kind].as_pointer())
    return [builder.gep(row, [builder.add(column, INT64(vector * LANES))]) for vector in range(vectors)]


@intrinsic
def has_pairs(typing_context: Any, kind: Any) -> Any:
    """Whether rows of a cache of this kind are read in pair order; known when the caller is compiled."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.IntType(1)(in_pairs(kind))

    return types.boolean(kind), codegen


@jit
def num_bands(columns: int) -> int:
    """Bands that a row is taken in: as wide as `band_width` says, one after the other."""
    return columns // 64 + columns // 32 % 2 + columns // 16 % 2


@jit
def band_width(columns: int) -> int:
    """Columns of the first band of so many columns: 4, 2 or 1 vectors."""
    if columns >= 64:
        return 64
    return 32 if columns >= 32 else 16


@jit
def natural_column(kind: Kind, index: int, depth: int) -> int:
    """Which column of a row of the cache comes at `index` of its order."""
    if has_pairs(kind) and index < depth // PAIR * PAIR:
        lane = index % PAIR
        return index - lane + 2 * (lane % LANES) + lane // LANES
    return index
