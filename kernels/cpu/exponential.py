"""exp for float32 as LLVM instructions, for a number or a vector (the C library's stays a call in loops)."""

import math
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.jit import cgutils, intrinsic
from kernels.cpu.memory import FLOAT, WORD, lanes, splat

LOG2_E = 1 / math.log(2)
LN2_HIGH = 0.693359375  # 9 bits, so that n · LN2_HIGH is exact
LN2_LOW = math.log(2) - LN2_HIGH
LOWEST, HIGHEST = -87.0, 88.0  # beyond these, 0 and exp(88): 2ⁿ stays a normal float
TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """exp(x) within 2 units in the last place; 0 below −87, exp(88) above 88, NaN for NaN."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_exp(builder, arguments[0], 1)

    return types.float32(types.float32), codegen


def emit_exp(builder: Any, x: Any, count: int) -> Any:
    """exp(x) = 2ⁿ · exp(r), n = round(x / ln 2), |r| ≤ ln 2 / 2; exp(r) by its Taylor series."""

    def constant(value: float) -> Any:
        return splat(FLOAT, value, count)

    capped = builder.select(builder.fcmp_unordered("ugt", constant(HIGHEST), x), x, constant(HIGHEST))
    capped = builder.select(builder.fcmp_unordered("ult", constant(LOWEST), capped), capped, constant(LOWEST))
    n = emit_math(builder, "rint", builder.fmul(capped, constant(LOG2_E)))
    r = emit_math(builder, "fma", n, constant(-LN2_HIGH), capped)
    r = emit_math(builder, "fma", n, constant(-LN2_LOW), r)
    value = constant(TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        value = emit_math(builder, "fma", value, r, constant(coefficient))
    exponent = builder.add(builder.fptosi(n, lanes(WORD, count)), splat(WORD, 127, count))
    power = builder.bitcast(builder.shl(exponent, splat(WORD, 23, count)), lanes(FLOAT, count))
    return builder.select(
        builder.fcmp_ordered("olt", x, constant(LOWEST)), constant(0.0), builder.fmul(value, power)
    )


def emit_math(builder: Any, name: str, *operands: Any) -> Any:
    """Call LLVM's `name` for float32 (fma, rint) on numbers or vectors."""
    kind = operands[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, operands)
