"""exp for float32 as LLVM instructions, for a number or a vector (the C library's stays a call in loops)."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.polynomial import Chebyshev, Polynomial

from kernels.cpu.jit import cgutils, intrinsic, jit
from kernels.cpu.memory import FLOAT, WORD, lanes, splat

LOG2_E = 1 / math.log(2)
LN2_HIGH = 0.693359375  # 9 bits, so that n · LN2_HIGH is exact
LN2_LOW = math.log(2) - LN2_HIGH
LOWEST, HIGHEST = -86.5, 88.0  # beyond these, 0 and exp(88): 2ⁿ · exp(r) stays a normal float
# exp(r) by its interpolation at 7 Chebyshev points: 2e-9 away at most
COEFFICIENTS = (
    Chebyshev.interpolate(np.exp, 6, [-math.log(2) / 2, math.log(2) / 2]).convert(kind=Polynomial).coef
)
# float32, so that numba computes in float32 (a Python number would make it float64)
ONE: Any = np.float32(1)
TWO: Any = np.float32(2)
ZERO: Any = np.float32(0)
NEAR: Any = np.float32(0.16)  # the square of 0.4: the next term is below 1e-7 of the sum
TANH = tuple(np.float32(c) for c in (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1))
EXPONENT = 23  # where the exponent begins in the bits of a float32


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """exp(x) within 2 units in the last place; 0 below −86.5, exp(88) above 88, NaN for NaN."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_exp(builder, arguments[0], 1)

    return types.float32(types.float32), codegen


@jit
def tanh(x: float) -> Any:
    """tanh(x) within 5e-7 of it: near 0, where 1 − 2 / (exp(2x) + 1) would cancel, by its Taylor series."""
    square, near = x * x, ZERO
    for coefficient in TANH:
        near = near * square + coefficient
    far = ONE - TWO / (exp(TWO * x) + ONE)
    return near * x if square < NEAR else far


def emit_exp(builder: Any, x: Any, count: int) -> Any:
    """exp(x) = 2ⁿ · exp(r), n = round(x / ln 2), |r| ≤ ln 2 / 2; 2ⁿ is added to the exponent."""

    def constant(value: float) -> Any:
        return splat(FLOAT, value, count)

    words = lanes(WORD, count)
    capped = builder.select(builder.fcmp_unordered("ugt", constant(HIGHEST), x), x, constant(HIGHEST))
    capped = builder.select(builder.fcmp_unordered("ult", constant(LOWEST), capped), capped, constant(LOWEST))
    n = emit_lrint(builder, builder.fmul(capped, constant(LOG2_E)))
    whole = builder.sitofp(n, lanes(FLOAT, count))
    r = emit_math(builder, "fma", whole, constant(-LN2_HIGH), capped)
    r = emit_math(builder, "fma", whole, constant(-LN2_LOW), r)
    value = constant(COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        value = emit_math(builder, "fma", value, r, constant(coefficient))
    bits = builder.add(builder.bitcast(value, words), builder.shl(n, splat(WORD, EXPONENT, count)))
    result = builder.bitcast(bits, lanes(FLOAT, count))
    return builder.select(builder.fcmp_ordered("olt", x, constant(LOWEST)), constant(0.0), result)


def emit_lrint(builder: Any, x: Any) -> Any:
    """The nearest int32, for a float32 or a vector."""
    vector = isinstance(x.type, ir.VectorType)
    result = lanes(WORD, x.type.count) if vector else WORD
    suffix = f"v{x.type.count}i32.v{x.type.count}f32" if vector else "i32.f32"
    signature = ir.FunctionType(result, [x.type])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.lrint.{suffix}")
    return builder.call(function, [x])


def emit_math(builder: Any, name: str, *operands: Any) -> Any:
    """Call LLVM's `name` for float32 (fma) on numbers or vectors."""
    kind = operands[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, operands)
