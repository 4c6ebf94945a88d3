"""The inner loops of attention, for vector registers: small matrix products and a transposition.

They read rows through a list of addresses (int64): a row may lie anywhere, in the cache or in scratch. They
are emitted as LLVM vectors of 16 floats, which LLVM fits to the registers that the CPU has.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kernels.cpu.columns import emit_load_columns, emit_over_columns
from kernels.cpu.exponential import emit_math
from kernels.cpu.jit import cgutils, intrinsic, literal_intrinsic
from kernels.cpu.memory import (
    BITS,
    FLOAT,
    LANES,
    SIZES,
    WORD,
    emit_broadcast,
    emit_load,
    emit_shuffle,
    emit_unpair,
    lanes,
    splat,
)

INT64 = ir.IntType(64)
VECTOR = lanes(FLOAT, LANES)
PAIRS = lanes(WORD, LANES)  # two 16-bit elements per lane
LINE = 64  # bytes of a cache line
TILE = 64  # keys of a tile of attention: 4 vectors of scores
READ, SECOND_LEVEL, DATA = 0, 2, 1  # llvm.prefetch: what for, how near, which cache
STRIP = 4  # keys that dot_products takes at a time: with 4 rows, 16 sums in registers
STRIPS = LANES // STRIP
ROWS = 4  # rows of one product: 4 × 4 vectors of sums, which leaves half of AVX-512's registers for operands


def literal_value(number: Any) -> int:
    """The value of a literal argument of an intrinsic; where numba tried without, ask it for the literal."""
    if not isinstance(number, types.IntegerLiteral):
        raise RequireLiteralValue("rows, vectors, ahead and wide are literals")
    value: int = number.literal_value
    return value


@intrinsic
def score_product(
    typing_context: Any, left: Any, left_stride: Any, right_rows: Any, depth: Any, result: Any
) -> Any:
    """result[0:4, 0:64] = left[0:4, 0:depth] @ right[0:depth, 0:64], all float32; result is [..., 64]."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, left_stride, right_rows, depth, result = arguments
        product = Product(types.float32, ROWS, TILE // LANES, keep=False, ahead=False)
        zero, stride = INT64(0), INT64(TILE * 4)
        emit_product(builder, product, left, left_stride, right_rows, zero, zero, depth, result, stride)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(int64, int64, int64, int64, int64), codegen


@literal_intrinsic
def add_product(
    typing_context: Any,
    kind: Any,
    rows: Any,
    vectors: Any,
    ahead: Any,
    left: Any,
    left_stride: Any,
    right_rows: Any,
    offset: Any,
    next_rows: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:rows, 0:16·vectors] += left[0:rows, 0:depth] @ right[0:depth, …].

    left and result are float32, their strides in bytes; right's row k starts at right_rows[k] + offset
    (bytes) and holds elements of `kind`, taken in its order; if `ahead`, the same place of next_rows is
    brought nearer. `rows` (up to 4), `vectors` (1, or even) and `ahead` are literals.
    """
    literals = [literal_value(number) for number in (rows, vectors, ahead)]
    product = Product(kind, literals[0], literals[1], keep=True, ahead=bool(literals[2]))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_product(builder, product, *arguments[4:])
        return context.get_dummy_value()

    return types.void(kind, rows, vectors, ahead, *[types.int64] * 8), codegen


class Product(NamedTuple):
    """What is fixed when a product is compiled."""

    kind: Any
    rows: int
    vectors: int
    keep: bool
    ahead: bool


def emit_product(
    builder: Any,
    product: Product,
    left: Any,
    left_stride: Any,
    right_rows: Any,
    offset: Any,
    next_rows: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> None:
    """The loop over the depth: a row of right against a column of left, rows · vectors sums in registers."""
    kind = product.kind
    left_rows = [emit_place(builder, left, left_stride, row, 0) for row in range(product.rows)]
    cells = [(row, vector) for row in range(product.rows) for vector in range(product.vectors)]
    places = [
        builder.bitcast(emit_place(builder, result, result_stride, row, vector), VECTOR.as_pointer())
        for row, vector in cells
    ]
    sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}
    for cell, place in zip(cells, places, strict=True):
        start = builder.load(place, align=4) if product.keep else splat(FLOAT, 0.0, LANES)
        builder.store(start, sums[cell])
    with cgutils.for_range(builder, depth) as loop:
        if product.ahead:
            upcoming = emit_row(builder, next_rows, loop.index, offset)
            emit_prefetch(builder, upcoming, product.vectors * LANES * SIZES[kind])
        right = builder.inttoptr(emit_row(builder, right_rows, loop.index, offset), BITS[kind].as_pointer())
        operands = emit_load_columns(builder, kind, right, product.vectors)
        for row in range(product.rows):
            factor = emit_broadcast(builder, builder.load(builder.gep(left_rows[row], [loop.index])))
            for vector, operand in enumerate(operands):
                total = sums[row, vector]
                builder.store(emit_math(builder, "fma", factor, operand, builder.load(total)), total)
    for cell, place in zip(cells, places, strict=True):
        builder.store(builder.load(sums[cell]), place, align=4)


def emit_place(builder: Any, base: Any, stride: Any, row: int, vector: int) -> Any:
    """Pointer to float32: `row` strides (bytes) and `vector` vectors past an address."""
    start = builder.add(base, builder.mul(stride, INT64(row)))
    return builder.inttoptr(builder.add(start, INT64(vector * LANES * 4)), FLOAT.as_pointer())


@literal_intrinsic
def dot_products(
    typing_context: Any,
    kind: Any,
    rows: Any,
    left: Any,
    keys: Any,
    next_keys: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:rows, 0:16] = left[0:rows, 0:depth] @ keysᵀ for 16 keys as they lie: nothing is transposed.

    left is float32 [rows, depth] in the order of `kind`, result float32, its stride in bytes; key k starts
    at keys[k] and holds `depth` elements of `kind`, a multiple of 16; next_keys are brought nearer. `rows`
    (up to 4) is a literal.
    """
    count = literal_value(rows)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, left, keys, next_keys, depth, result, result_stride = arguments
        row_size = builder.mul(depth, INT64(4))
        left_rows = [emit_place(builder, left, row_size, row, 0) for row in range(count)]
        strips = cgutils.alloca_once(builder, VECTOR, size=count * STRIPS)
        with cgutils.for_range(builder, INT64(STRIPS)) as loop:
            first_key = builder.mul(loop.index, INT64(STRIP))
            sums = emit_dots(builder, kind, left_rows, keys, next_keys, first_key, depth)
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


def emit_dots(
    builder: Any,
    kind: Any,
    left_rows: list[Any],
    keys: Any,
    next_keys: Any,
    first_key: Any,
    depth: Any,
) -> list[list[Any]]:
    """Per row and key of a strip, a vector whose lanes sum up to row · key; a line of the keys at a time."""
    indices = [builder.add(first_key, INT64(key)) for key in range(STRIP)]
    zero, size = INT64(0), LANES * SIZES[kind]
    key_rows, upcoming = (
        [builder.inttoptr(emit_row(builder, rows, index, zero), BITS[kind].as_pointer()) for index in indices]
        for rows in (keys, next_keys)
    )
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in indices] for _ in left_rows]
    for total in (total for row in sums for total in row):
        builder.store(splat(FLOAT, 0.0, LANES), total)

    def add(column: Any, vectors: int) -> None:
        for row in upcoming:
            emit_prefetch(builder, builder.ptrtoint(builder.gep(row, [column]), INT64), vectors * size)
        operands = [emit_load_columns(builder, kind, builder.gep(row, [column]), vectors) for row in key_rows]
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


def emit_prefetch(builder: Any, address: Any, size: int) -> None:
    """Ask for `size` bytes at an address to be brought into the second-level cache, line by line."""
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    for line in range(0, size, LINE):
        place = builder.inttoptr(builder.add(address, INT64(line)), byte_pointer)
        builder.call(function, [place, WORD(READ), WORD(SECOND_LEVEL), WORD(DATA)])


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
