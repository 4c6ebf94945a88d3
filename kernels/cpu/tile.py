"""The two inner loops of attention, for vector registers: a small matrix product and a transposition.

Both read rows through a list of addresses (int64): a row may lie anywhere, in the cache or in scratch. They
are emitted as LLVM vectors of 16 floats, which LLVM fits to the registers that the CPU has.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

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
    emit_widen,
    lanes,
    splat,
)

INT64 = ir.IntType(64)
VECTOR = lanes(FLOAT, LANES)
PAIRS = lanes(WORD, LANES)  # two 16-bit elements per lane
LINE = 64  # bytes of a cache line
TILE = 64  # keys of a tile of attention: 4 vectors of scores
READ, SECOND_LEVEL, DATA = 0, 2, 1  # llvm.prefetch: what for, how near, which cache
ROWS = 4  # rows of one product: 4 × 4 vectors of sums, which leaves half of AVX-512's registers for operands


@intrinsic
def score_product(
    typing_context: Any, left: Any, left_stride: Any, right_rows: Any, depth: Any, result: Any
) -> Any:
    """result[0:4, 0:64] = left[0:4, 0:depth] @ right[0:depth, 0:64], all float32; result is [..., 64]."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, left_stride, right_rows, depth, result = arguments
        product = Product(types.float32, TILE // LANES, keep=False, ahead=False)
        zero, stride = INT64(0), INT64(TILE * 4)
        emit_product(builder, product, left, left_stride, right_rows, zero, zero, depth, result, stride)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(int64, int64, int64, int64, int64), codegen


@literal_intrinsic
def add_product(
    typing_context: Any,
    kind: Any,
    vectors: Any,
    ahead: Any,
    left: Any,
    right_rows: Any,
    offset: Any,
    next_rows: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:4, 0:16·vectors] += left[0:4, 0:depth] @ right[0:depth, …].

    left is float32 [..., 64]; right's row k starts at right_rows[k] + offset (bytes) and holds elements of
    `kind`; if `ahead`, the same place of next_rows is brought nearer. `vectors` and `ahead` are literals.
    """
    if not isinstance(vectors, types.IntegerLiteral) or not isinstance(ahead, types.IntegerLiteral):
        raise RequireLiteralValue("vectors and ahead are literals")
    product = Product(kind, vectors.literal_value, keep=True, ahead=bool(ahead.literal_value))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, left, right_rows, offset, next_rows, depth, result, stride = arguments
        left_stride = INT64(TILE * 4)
        emit_product(
            builder, product, left, left_stride, right_rows, offset, next_rows, depth, result, stride
        )
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(kind, vectors, ahead, int64, int64, int64, int64, int64, int64, int64), codegen


class Product(NamedTuple):
    """What is fixed when a product is compiled."""

    kind: Any
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
    """The loop over the depth: a row of right against four numbers of left, 4 · vectors sums in registers."""
    kind = product.kind
    left_rows = [emit_place(builder, left, left_stride, row, 0) for row in range(ROWS)]
    cells = [(row, vector) for row in range(ROWS) for vector in range(product.vectors)]
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
            for line in range(0, product.vectors * LANES * SIZES[kind], LINE):
                emit_prefetch(builder, builder.add(upcoming, INT64(line)))
        right = builder.inttoptr(emit_row(builder, right_rows, loop.index, offset), BITS[kind].as_pointer())
        operands = [
            emit_load(builder, kind, builder.gep(right, [INT64(LANES * vector)]), LANES)
            for vector in range(product.vectors)
        ]
        for row in range(ROWS):
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
def transpose(
    typing_context: Any, kind: Any, wide: Any, rows: Any, offset: Any, result: Any, next_rows: Any
) -> Any:
    """result[j, i] = row i, element j, as float32, for 16 rows and 16 elements, or `transpose_width` if wide.

    Row i starts at rows[i] + offset (an address plus bytes); result is float32 [..., 64]. The same place of
    next_rows is brought nearer. `wide` (0 or 1) is a literal.
    """
    if not isinstance(wide, types.IntegerLiteral):
        raise RequireLiteralValue("wide is a literal")
    paired = bool(wide.literal_value) and SIZES[kind] == 2

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, offset, result, next_rows = arguments
        element = PAIRS if paired else BITS[kind]
        values = []
        for row in range(LANES):
            emit_prefetch(builder, emit_row(builder, next_rows, row, offset))
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


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address to be brought into the second-level cache."""
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    place = builder.inttoptr(address, byte_pointer)
    builder.call(function, [place, WORD(READ), WORD(SECOND_LEVEL), WORD(DATA)])


def emit_unpair(builder: Any, kind: Any, pairs: Any) -> tuple[Any, Any]:
    """The low and the high 16 bits of every lane, as float32."""
    shift = splat(WORD, 16, LANES)
    if kind == types.uint16:  # bfloat16 is the upper half of a float32
        high = builder.and_(pairs, splat(WORD, 0xFFFF0000, LANES))
        return builder.bitcast(builder.shl(pairs, shift), VECTOR), builder.bitcast(high, VECTOR)
    narrow = lanes(BITS[kind], LANES)
    low, high = builder.trunc(pairs, narrow), builder.trunc(builder.lshr(pairs, shift), narrow)
    return emit_widen(builder, kind, low, LANES), emit_widen(builder, kind, high, LANES)


def emit_transpose(builder: Any, values: list[Any]) -> list[Any]:
    """Swap off-diagonal quarters at distance 1, 2, 4, 8: then lane i of vector j was lane j of vector i."""
    values = list(values)
    distance = 1
    while distance < LANES:
        keep_low = [i if not i & distance else i - distance + LANES for i in range(LANES)]
        keep_high = [i + distance if not i & distance else i + LANES for i in range(LANES)]
        for low in (i for i in range(LANES) if not i & distance):
            first, second = values[low], values[low + distance]
            values[low] = emit_shuffle(builder, first, second, keep_low)
            values[low + distance] = emit_shuffle(builder, first, second, keep_high)
        distance *= 2
    return values


def emit_shuffle(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    """Lanes picked from the two vectors, one after the other."""
    mask = ir.Constant(lanes(WORD, LANES), order)
    return builder.shuffle_vector(first, second, mask)
