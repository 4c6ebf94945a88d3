"""The two inner loops of attention, for vector registers: a small matrix product and a transposition.

Both read rows through a list of addresses (int64): a row may lie anywhere, in the cache or in scratch. They
are emitted as LLVM vectors of 16 floats, which LLVM fits to the registers that the CPU has.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kernels.cpu.jit import cgutils, intrinsic, literal_intrinsic
from kernels.cpu.memory import BITS, FLOAT, LANES, emit_load

INT64 = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
ROWS = 4  # rows of one product: 4 × 4 vectors of sums, which leaves half of AVX-512's registers for operands


@literal_intrinsic
def tile_product(
    typing_context: Any,
    kind: Any,
    vectors: Any,
    keep: Any,
    left: Any,
    left_stride: Any,
    right_rows: Any,
    right_offset: Any,
    depth: Any,
    result: Any,
    result_stride: Any,
) -> Any:
    """result[0:4, 0:16·vectors] = (keep · result) + left[0:4, 0:depth] @ right[0:depth, …].

    left and result are float32 at an address, with a row stride in bytes; row k of right starts at
    right_rows[k] + right_offset and holds elements of `kind`. `vectors` and `keep` (0 or 1) are literals.
    """
    if not isinstance(vectors, types.IntegerLiteral) or not isinstance(keep, types.IntegerLiteral):
        raise RequireLiteralValue("vectors and keep are literals")
    num_vectors, keeps = vectors.literal_value, bool(keep.literal_value)
    cells = [(row, vector) for row in range(ROWS) for vector in range(num_vectors)]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, left, left_stride, right_rows, right_offset, depth, result, result_stride = arguments
        element = BITS[kind].as_pointer()
        places = {
            (row, vector): builder.inttoptr(
                builder.add(result, builder.add(builder.mul(result_stride, INT64(row)), INT64(64 * vector))),
                VECTOR.as_pointer(),
            )
            for row, vector in cells
        }
        sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}
        for cell in cells:
            start = builder.load(places[cell], align=4) if keeps else ir.Constant(VECTOR, [0.0] * LANES)
            builder.store(start, sums[cell])
        row_list = builder.inttoptr(right_rows, INT64.as_pointer())
        left_rows = [
            builder.inttoptr(builder.add(left, builder.mul(left_stride, INT64(row))), FLOAT.as_pointer())
            for row in range(ROWS)
        ]
        with cgutils.for_range(builder, depth) as loop:
            address = builder.add(builder.load(builder.gep(row_list, [loop.index])), right_offset)
            right = builder.inttoptr(address, element)
            operands = [
                emit_load(builder, kind, builder.gep(right, [INT64(LANES * vector)]), LANES)
                for vector in range(num_vectors)
            ]
            for row in range(ROWS):
                scalar = builder.load(builder.gep(left_rows[row], [loop.index]))
                factor = emit_broadcast(builder, scalar)
                for vector in range(num_vectors):
                    total = sums[row, vector]
                    builder.store(emit_fma(builder, factor, operands[vector], builder.load(total)), total)
        for cell in cells:
            builder.store(builder.load(sums[cell]), places[cell], align=4)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(kind, vectors, keep, int64, int64, int64, int64, int64, int64, int64), codegen


def emit_fma(builder: Any, factor: Any, operand: Any, addend: Any) -> Any:
    """factor · operand + addend in every lane."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [factor, operand, addend])


def emit_broadcast(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


@intrinsic
def transpose(typing_context: Any, kind: Any, rows: Any, offset: Any, result: Any, result_stride: Any) -> Any:
    """result[j, i] = row i, element j, as float32, for 16 rows and 16 elements.

    Row i starts at rows[i] + offset (an address plus bytes); result is float32, with a row stride in bytes.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, rows, offset, result, result_stride = arguments
        row_list = builder.inttoptr(rows, INT64.as_pointer())
        values = []
        for row in range(LANES):
            address = builder.add(builder.load(builder.gep(row_list, [INT64(row)])), offset)
            values.append(emit_load(builder, kind, builder.inttoptr(address, BITS[kind].as_pointer()), LANES))
        for index, value in enumerate(emit_transpose(builder, values)):
            address = builder.add(result, builder.mul(result_stride, INT64(index)))
            builder.store(value, builder.inttoptr(address, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(kind, int64, int64, int64, int64), codegen


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
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
    return builder.shuffle_vector(first, second, mask)
