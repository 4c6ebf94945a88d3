"""The inner loops of attention for many rows: small matrix products in float32 and a transposition.

They read rows through a list of addresses (int64): a row may lie anywhere, in the cache or in scratch. They
are emitted as LLVM vectors of 16 floats, which LLVM fits to the registers that the CPU has.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.exponential import emit_math
from kernels.cpu.jit import cgutils, intrinsic, literal_intrinsic, literal_value
from kernels.cpu.memory import (
    BITS,
    FLOAT,
    LANES,
    LINE,
    SIZES,
    WORD,
    emit_broadcast,
    emit_load,
    emit_place,
    emit_prefetch,
    emit_shuffle,
    emit_unpair,
    lanes,
    splat,
)

INT64 = ir.IntType(64)
VECTOR = lanes(FLOAT, LANES)
PAIRS = lanes(WORD, LANES)  # two 16-bit elements per lane
TILE = 64  # keys of a tile of attention: 4 vectors of scores
ROWS = 4  # rows of one product: 4 × 4 vectors of sums, which leaves half of AVX-512's registers for operands


@intrinsic
def score_product(
    typing_context: Any, left: Any, left_stride: Any, right_rows: Any, depth: Any, result: Any
) -> Any:
    """result[0:4, 0:64] = left[0:4, 0:depth] @ right[0:depth, 0:64], all float32; result is [..., 64]."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, left_stride, right_rows, depth, result = arguments
        zero, stride = INT64(0), INT64(TILE * 4)
        start = splat(FLOAT, 0.0, LANES)
        operands = left, left_stride, right_rows, zero, depth, result, stride
        emit_product(builder, TILE // LANES, start, *operands)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@literal_intrinsic
def add_product(
    typing_context: Any,
    vectors: Any,
    left: Any,
    left_stride: Any,
    right_rows: Any,
    offset: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:4, 0:16·vectors] += left[0:4, 0:depth] @ right[0:depth, …], all float32, strides in bytes.

    right's row k starts at right_rows[k] + offset (bytes). `vectors` (up to 4) is a literal.
    """
    count = literal_value(vectors)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_product(builder, count, None, *arguments[1:])
        return context.get_dummy_value()

    return types.void(vectors, *[types.int64] * 7), codegen


def emit_product(
    builder: Any,
    vectors: int,
    start: Any,
    left: Any,
    left_stride: Any,
    right_rows: Any,
    offset: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> None:
    """The loop over the depth: a row of right against a column of left, 4 · vectors sums in registers.

    Sums begin with `start`, or with the result where it is None.
    """
    left_rows = [emit_place(builder, left, left_stride, row, 0) for row in range(ROWS)]
    cells = [(row, vector) for row in range(ROWS) for vector in range(vectors)]
    places = [
        builder.bitcast(emit_place(builder, result, result_stride, row, vector), VECTOR.as_pointer())
        for row, vector in cells
    ]
    sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}
    for cell, place in zip(cells, places, strict=True):
        builder.store(builder.load(place, align=4) if start is None else start, sums[cell])
    with cgutils.for_range(builder, depth) as loop:
        right = builder.inttoptr(emit_row(builder, right_rows, loop.index, offset), VECTOR.as_pointer())
        operands = [builder.load(builder.gep(right, [INT64(vector)]), align=4) for vector in range(vectors)]
        for row in range(ROWS):
            factor = emit_broadcast(builder, builder.load(builder.gep(left_rows[row], [loop.index])))
            for vector, operand in enumerate(operands):
                total = sums[row, vector]
                builder.store(emit_math(builder, "fma", factor, operand, builder.load(total)), total)
    for cell, place in zip(cells, places, strict=True):
        builder.store(builder.load(sums[cell]), place, align=4)


@literal_intrinsic
def transpose(
    typing_context: Any, kind: Any, wide: Any, rows: Any, offset: Any, result: Any, next_rows: Any
) -> Any:
    """result[j, i] = row i, element j, as float32, for 16 rows and 16 elements, or `transpose_width` if wide.

    Row i starts at rows[i] + offset (an address plus bytes); result is float32 [..., 64]. The same place of
    next_rows is brought nearer. `wide` (0 or 1) is a literal.
    """
    paired = bool(literal_value(wide)) and SIZES[kind] == 2

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, offset, result, next_rows = arguments
        element = PAIRS if paired else BITS[kind]
        values = []
        for row in range(LANES):
            emit_prefetch(builder, emit_row(builder, next_rows, row, offset), LINE)
            place = builder.inttoptr(emit_row(builder, rows, row, offset), element.as_pointer())
            values.append(builder.load(place, align=2) if paired else emit_load(builder, kind, place, LANES))
        columns = emit_transpose(builder, values)
        if paired:
            columns = [half for pairs in columns for half in emit_unpair(builder, kind, pairs)]
        base = builder.inttoptr(result, FLOAT.as_pointer())
        for index, column in enumerate(columns):
            place = builder.bitcast(builder.gep(base, [INT64(index * TILE)]), VECTOR.as_pointer())
            builder.store(column, place, align=4)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(kind, wide, int64, int64, int64, int64), codegen


@intrinsic
def transpose_width(typing_context: Any, kind: Any) -> Any:
    """Elements per row of a wide transposition: 16-bit elements go in pairs."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return INT64(LANES * 4 // SIZES[kind])

    return types.int64(kind), codegen


def emit_row(builder: Any, rows: Any, index: Any, offset: Any) -> Any:
    """Address of row `index` of a list of rows, plus `offset` bytes."""
    row_list = builder.inttoptr(rows, INT64.as_pointer())
    position = INT64(index) if isinstance(index, int) else index
    return builder.add(builder.load(builder.gep(row_list, [position])), offset)


def emit_transpose(builder: Any, values: list[Any]) -> list[Any]:
    """Swap off-diagonal quarters at distance 1, 2, 4, 8: then lane i of vector j was lane j of vector i."""
    values = list(values)
    distance = 1
    while distance < LANES:
        keep_low, keep_high = swap_orders(distance)
        for low in (i for i in range(LANES) if not i & distance):
            first, second = values[low], values[low + distance]
            values[low] = emit_shuffle(builder, first, second, keep_low)
            values[low + distance] = emit_shuffle(builder, first, second, keep_high)
        distance *= 2
    return values


def swap_orders(distance: int) -> tuple[list[int], list[int]]:
    """Lanes of the first and second vector that come of two when lanes at `distance` are swapped."""
    keep_low = [i if not i & distance else i - distance + LANES for i in range(LANES)]
    keep_high = [i + distance if not i & distance else i + LANES for i in range(LANES)]
    return keep_low, keep_high
