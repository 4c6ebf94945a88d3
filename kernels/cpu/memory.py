"""Element types in memory, and how they become float32 and back.

A kernel is compiled once per element type. The type is chosen by a *kind*: a numpy scalar whose type stands
for the element type (numba has no bfloat16, and its float16 does not compute on CPUs):

    numpy.uint16  bfloat16, as its bits      numpy.int16  float16, as its bits      numpy.float32  float32

Addresses are plain integers: an argument then costs the caller no array object.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from kernels.cpu.jit import cgutils, intrinsic

Kind = Any  # a numpy scalar, for its type
Pointer = Any  # what `elements` returns

LANES = 16  # floats per vector: one AVX-512 register, two of AVX2, four of NEON or SSE
LINE = 64  # bytes of a cache line
READ, SECOND_LEVEL, DATA = 0, 2, 1  # llvm.prefetch: what for, how near, which cache


class Kinds(dict[torch.dtype, Any]):
    """torch dtype → kind. An int8 or float8 cache is one more kind here, with its load and store."""

    def __missing__(self, dtype: torch.dtype) -> Any:
        supported = ", ".join(str(known) for known in self)
        raise TypeError(f"CPU kernels got a {dtype} tensor; they take {supported}")


KINDS = Kinds({torch.bfloat16: np.uint16(0), torch.float16: np.int16(0), torch.float32: np.float32(0)})
FLOAT32: Kind = np.float32(0)
INT32: Kind = np.int32(0)
INT64: Kind = np.int64(0)

WORD, FLOAT = ir.IntType(32), ir.FloatType()
SIZES = {types.uint16: 2, types.int16: 2, types.float32: 4}
BITS = {types.uint16: ir.IntType(16), types.int16: ir.IntType(16), types.float32: FLOAT}


def lanes(scalar: Any, count: int) -> Any:
    """The type of `count` scalars: the scalar itself, or a vector of them."""
    return scalar if count == 1 else ir.VectorType(scalar, count)


def splat(scalar: Any, value: float, count: int) -> Any:
    """A constant in every lane."""
    return scalar(value) if count == 1 else ir.Constant(ir.VectorType(scalar, count), [value] * count)


def emit_broadcast(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    vector = lanes(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(lanes(WORD, LANES), [0] * LANES))


def emit_load(builder: Any, kind: Any, pointer: Any, count: int) -> Any:
    """Read `count` elements of a kind at an element pointer as float32."""
    bits = builder.load(builder.bitcast(pointer, lanes(BITS[kind], count).as_pointer()), align=SIZES[kind])
    return emit_widen(builder, kind, bits, count)


def emit_widen(builder: Any, kind: Any, bits: Any, count: int) -> Any:
    """The bits of a kind as float32."""
    if kind == types.float32:
        return bits
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, lanes(ir.HalfType(), count)), lanes(FLOAT, count))
    wide = builder.shl(builder.zext(bits, lanes(WORD, count)), splat(WORD, 16, count))
    return builder.bitcast(wide, lanes(FLOAT, count))


def emit_bits_pair(builder: Any, kind: Any, pointer: Any) -> tuple[Any, Any]:
    """Read 32 elements of a 16-bit kind as float32: the even ones, the odd ones."""
    words = builder.bitcast(pointer, lanes(WORD, LANES).as_pointer())
    return emit_unpair(builder, kind, builder.load(words, align=2))


def emit_unpair(builder: Any, kind: Any, pairs: Any) -> tuple[Any, Any]:
    """The low and the high 16 bits of every lane, as float32."""
    shift, vector = splat(WORD, 16, LANES), lanes(FLOAT, LANES)
    if kind == types.uint16:  # bfloat16 is the upper half of a float32
        high = builder.and_(pairs, splat(WORD, 0xFFFF0000, LANES))
        return builder.bitcast(builder.shl(pairs, shift), vector), builder.bitcast(high, vector)
    narrow = lanes(BITS[kind], LANES)
    low, high = builder.trunc(pairs, narrow), builder.trunc(builder.lshr(pairs, shift), narrow)
    return emit_widen(builder, kind, low, LANES), emit_widen(builder, kind, high, LANES)


def emit_shuffle(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    """Lanes picked from the two vectors, one after the other."""
    mask = ir.Constant(lanes(WORD, LANES), order)
    return builder.shuffle_vector(first, second, mask)


def emit_place(builder: Any, base: Any, stride: Any, row: int, vector: int) -> Any:
    """Pointer to float32: `row` strides (bytes) and `vector` vectors past an address."""
    start = builder.add(base, builder.mul(stride, ir.IntType(64)(row)))
    return builder.inttoptr(builder.add(start, ir.IntType(64)(vector * LANES * 4)), FLOAT.as_pointer())


def emit_prefetch(builder: Any, address: Any, size: int) -> None:
    """Ask for `size` bytes at an address to be brought into the second-level cache, line by line."""
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    for line in range(0, size, LINE):
        place = builder.inttoptr(builder.add(address, ir.IntType(64)(line)), byte_pointer)
        builder.call(function, [place, WORD(READ), WORD(SECOND_LEVEL), WORD(DATA)])


def emit_store(builder: Any, kind: Any, pointer: Any, value: Any, count: int) -> None:
    """Write float32 values as elements of a kind, rounded to nearest even."""
    if kind == types.int16:
        half = builder.fptrunc(value, lanes(ir.HalfType(), count))
        value = builder.bitcast(half, lanes(BITS[kind], count))
    elif kind == types.uint16:
        value = emit_bfloat16(builder, value, count)
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=SIZES[kind])


def emit_bfloat16(builder: Any, value: Any, count: int) -> Any:
    """float32 → bfloat16 bits: round to nearest even; a NaN stays a (quiet) NaN."""
    bits = builder.bitcast(value, lanes(WORD, count))
    odd = builder.and_(builder.lshr(bits, splat(WORD, 16, count)), splat(WORD, 1, count))
    rounded = builder.add(builder.add(bits, splat(WORD, 0x7FFF, count)), odd)
    quiet = builder.or_(bits, splat(WORD, 0x400000, count))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, splat(WORD, 16, count)), lanes(ir.IntType(16), count))


@intrinsic
def elements(typing_context: Any, kind: Any, address: Any) -> Any:
    """A typed pointer to the elements of a kind (or to int32, int64) at an address."""
    pointer_type: Any = types.CPointer
    result = pointer_type(kind)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(result))

    return result(kind, types.int64), codegen


@intrinsic
def load(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Element `index` as float32."""
    kind = pointer.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(builder, kind, builder.gep(arguments[0], [arguments[1]]), 1)

    return types.float32(pointer, types.int64), codegen


@intrinsic
def store(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Set element `index` to a float32 value, rounded to the element type."""
    kind = pointer.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_store(builder, kind, builder.gep(arguments[0], [arguments[1]]), arguments[2], 1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), codegen


@intrinsic
def size_of(typing_context: Any, kind: Any) -> Any:
    """Bytes of one element of a kind."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.IntType(64)(SIZES[kind])

    return types.int64(kind), codegen
