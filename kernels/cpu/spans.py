"""The inner loops of attention for few rows: keys and values are multiplied as they lie in the cache.

A span is 8 neighbouring slots of one block; blocks are made of whole spans. It is given by the address of its
first row; the others follow at a step (bytes). Lists of spans (int64) are in the order of the work: while one
is computed, the one `AHEAD` places after it is prefetched.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.columns import emit_load_columns, emit_over_columns
from kernels.cpu.exponential import emit_math
from kernels.cpu.jit import cgutils, intrinsic, literal_intrinsic, literal_value
from kernels.cpu.memory import (
    BITS,
    FLOAT,
    LANES,
    LINE,
    SIZES,
    emit_broadcast,
    emit_place,
    emit_prefetch,
    emit_shuffle,
    lanes,
    splat,
)

INT64 = ir.IntType(64)
VECTOR = lanes(FLOAT, LANES)
SPAN = 8  # slots
AHEAD = 8  # spans: 8 KiB of a bfloat16 cache with heads of 64
STRIP = 4  # keys that dot_products takes at a time: with 4 rows, 16 sums in registers
STRIPS = LANES // STRIP
STRIPS_OF_SPAN = SPAN // STRIP


@literal_intrinsic
def dot_products(
    typing_context: Any,
    kind: Any,
    rows: Any,
    left: Any,
    spans: Any,
    step: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:rows, 0:16] = left[0:rows, 0:depth] @ keysᵀ for the 16 keys of spans[0] and spans[1].

    left is float32 [rows, depth] in the order of `kind`, result float32, its stride in bytes. Keys are
    `depth` elements of `kind`, a multiple of 16. `rows` (up to 4) is a literal.
    """
    count = literal_value(rows)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, left, spans, step, depth, result, result_stride = arguments
        row_size = builder.mul(depth, INT64(4))
        left_rows = [emit_place(builder, left, row_size, row, 0) for row in range(count)]
        strips = cgutils.alloca_once(builder, VECTOR, size=count * STRIPS)
        with cgutils.for_range(builder, INT64(STRIPS)) as loop:
            span = builder.udiv(loop.index, INT64(STRIPS_OF_SPAN))
            first = builder.mul(builder.urem(loop.index, INT64(STRIPS_OF_SPAN)), INT64(STRIP))
            keys, upcoming = (
                emit_rows(builder, kind, spans, builder.add(span, INT64(ahead)), first, step)
                for ahead in (0, AHEAD)
            )
            sums = emit_dots(builder, kind, left_rows, keys, upcoming, depth)
            for row, vectors in enumerate(sums):
                place = builder.gep(strips, [builder.add(loop.index, INT64(row * STRIPS))])
                builder.store(emit_fold(builder, vectors, 1), place)
        for row in range(count):
            places = [builder.gep(strips, [INT64(row * STRIPS + strip)]) for strip in range(STRIPS)]
            total = emit_fold(builder, [builder.load(place) for place in places], STRIP)
            place = emit_place(builder, result, result_stride, row, 0)
            builder.store(total, builder.bitcast(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, rows, *[types.int64] * 6), codegen


@intrinsic
def prefetch_span(typing_context: Any, spans: Any, step: Any, size: Any) -> Any:
    """Bring the first `size` bytes of the rows of spans[AHEAD] nearer."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        spans, step, size = arguments
        start = emit_span(builder, spans, INT64(AHEAD))
        with cgutils.for_range(builder, INT64(SPAN)) as loop:
            row = builder.add(start, builder.mul(step, loop.index))
            with cgutils.for_range_slice(builder, INT64(0), size, INT64(LINE), inc=True) as (line, _):
                emit_prefetch(builder, builder.add(row, line), LINE)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def emit_rows(builder: Any, kind: Any, spans: Any, span: Any, first: Any, step: Any) -> list[Any]:
    """Pointers to the rows of a strip, which begins with row `first` of the span."""
    start = builder.add(emit_span(builder, spans, span), builder.mul(first, step))
    addresses = [builder.add(start, builder.mul(step, INT64(row))) for row in range(STRIP)]
    return [builder.inttoptr(address, BITS[kind].as_pointer()) for address in addresses]


def emit_span(builder: Any, spans: Any, index: Any) -> Any:
    """The address of a span of the list."""
    return builder.load(builder.gep(builder.inttoptr(spans, INT64.as_pointer()), [index]))


def emit_dots(
    builder: Any, kind: Any, left_rows: list[Any], keys: list[Any], upcoming: list[Any], depth: Any
) -> list[list[Any]]:
    """Per row and key of a strip, a vector whose lanes sum up to row · key."""
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in keys] for _ in left_rows]
    for total in (total for row in sums for total in row):
        builder.store(splat(FLOAT, 0.0, LANES), total)

    def add(column: Any, vectors: int) -> None:
        for row in upcoming:
            address = builder.ptrtoint(builder.gep(row, [column]), INT64)
            emit_prefetch(builder, address, vectors * LANES * SIZES[kind])
        operands = [emit_load_columns(builder, kind, builder.gep(row, [column]), vectors) for row in keys]
        for left_row, row_sums in zip(left_rows, sums, strict=True):
            factors = emit_load_columns(builder, types.float32, builder.gep(left_row, [column]), vectors)
            for vector, factor in enumerate(factors):
                for operand, total in zip(operands, row_sums, strict=True):
                    fma = emit_math(builder, "fma", factor, operand[vector], builder.load(total))
                    builder.store(fma, total)

    emit_over_columns(builder, depth, add)
    return [[builder.load(total) for total in row] for row in sums]


def emit_fold(builder: Any, vectors: list[Any], distance: int) -> Any:
    """Halve the number of vectors until one is left, by sums of lanes at `distance`, 2 · `distance`, …

    16 vectors folded from distance 1 on become one, whose lane i is the sum of vector i.
    """
    while len(vectors) > 1:
        here = [i + LANES if i & distance else i for i in range(LANES)]  # a blend, which any vector unit does
        there = [i - distance + LANES if i & distance else i + distance for i in range(LANES)]
        vectors = [
            builder.fadd(emit_shuffle(builder, a, b, here), emit_shuffle(builder, a, b, there))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance *= 2
    return vectors[0]


@literal_intrinsic
def weighted_sums(
    typing_context: Any,
    kind: Any,
    rows: Any,
    vectors: Any,
    weights: Any,
    weights_stride: Any,
    spans: Any,
    step: Any,
    low: Any,
    high: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:rows, 0:16·vectors] = weights[0:rows, low:high] @ values[low:high, …].

    weights and result are float32, their strides in bytes; value t is row t % 8 of spans[t // 8] and holds
    elements of `kind`, taken in its order. No other row is read. `rows` (up to 4) and `vectors` (1, or even)
    are literals.
    """
    num_rows, num_vectors = literal_value(rows), literal_value(vectors)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, weights_stride, spans, step, low, high, result, result_stride = arguments[3:]
        weight_rows = [emit_place(builder, weights, weights_stride, row, 0) for row in range(num_rows)]
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(num_vectors)] for _ in weight_rows]
        for total in (total for row in sums for total in row):
            builder.store(splat(FLOAT, 0.0, LANES), total)

        def add(value: Any, token: Any) -> None:
            operands = emit_load_columns(builder, kind, value, num_vectors)
            for weight_row, row_sums in zip(weight_rows, sums, strict=True):
                weight = emit_broadcast(builder, builder.load(builder.gep(weight_row, [token])))
                for operand, total in zip(operands, row_sums, strict=True):
                    builder.store(emit_math(builder, "fma", weight, operand, builder.load(total)), total)

        emit_over_rows(builder, kind, spans, step, (low, high), num_vectors, add)
        for row, row_sums in enumerate(sums):
            for vector, total in enumerate(row_sums):
                place = emit_place(builder, result, result_stride, row, vector)
                builder.store(builder.load(total), builder.bitcast(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, rows, vectors, *[types.int64] * 8), codegen


def emit_over_rows(
    builder: Any, kind: Any, spans: Any, step: Any, bounds: tuple[Any, Any], vectors: int, add: Any
) -> None:
    """add(pointer, token) for the rows within the bounds; the row AHEAD spans later is prefetched."""
    low, high = bounds
    size = INT64(SPAN)
    num_spans = builder.udiv(builder.add(high, INT64(SPAN - 1)), size)
    with cgutils.for_range(builder, num_spans) as span_loop:
        origin = builder.mul(span_loop.index, size)
        value, upcoming = (
            emit_span(builder, spans, builder.add(span_loop.index, INT64(ahead))) for ahead in (0, AHEAD)
        )
        first = emit_most(builder, ">", builder.sub(low, origin), INT64(0))
        last = emit_most(builder, "<", builder.sub(high, origin), size)
        with cgutils.for_range_slice(builder, first, last, INT64(1), inc=True) as (row, _):
            offset = builder.mul(row, step)
            emit_prefetch(builder, builder.add(upcoming, offset), vectors * LANES * SIZES[kind])
            place = builder.inttoptr(builder.add(value, offset), BITS[kind].as_pointer())
            add(place, builder.add(origin, row))


def emit_most(builder: Any, comparison: str, first: Any, second: Any) -> Any:
    """The larger (">") or the smaller ("<") of two signed numbers."""
    return builder.select(builder.icmp_signed(comparison, first, second), first, second)
