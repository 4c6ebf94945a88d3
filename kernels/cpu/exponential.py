"""exp for float32, written so that LLVM makes vector code of loops over it (the C library's stays a call)."""

import math
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.jit import intrinsic

WORD, FLOAT = ir.IntType(32), ir.FloatType()
LOG2_E = 1 / math.log(2)
LN2_HIGH, LN2_LOW = (
    0.693359375,
    math.log(2) - 0.693359375,
)  # the high part has 9 bits, so n · LN2_HIGH is exact
LOWEST, HIGHEST = -87.0, 88.0  # beyond these, 0 and exp(88): 2ⁿ stays a normal float
TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """exp(x) within 2 units in the last place; 0 below −87, exp(88) above 88, NaN for NaN.

    exp(x) = 2ⁿ · exp(r) with n = round(x / ln 2) and |r| ≤ ln 2 / 2, exp(r) by its Taylor series.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        capped = builder.select(builder.fcmp_unordered("ugt", FLOAT(HIGHEST), x), x, FLOAT(HIGHEST))
        capped = builder.select(builder.fcmp_unordered("ult", FLOAT(LOWEST), capped), capped, FLOAT(LOWEST))
        rint = builder.module.declare_intrinsic("llvm.rint", [FLOAT])
        n = builder.call(rint, [builder.fmul(capped, FLOAT(LOG2_E))])
        r = builder.fma(n, FLOAT(-LN2_HIGH), capped)
        r = builder.fma(n, FLOAT(-LN2_LOW), r)
        value = FLOAT(TAYLOR[0])
        for coefficient in TAYLOR[1:]:
            value = builder.fma(value, r, FLOAT(coefficient))
        exponent = builder.shl(builder.add(builder.fptosi(n, WORD), WORD(127)), WORD(23))
        value = builder.fmul(value, builder.bitcast(exponent, FLOAT))
        return builder.select(builder.fcmp_ordered("olt", x, FLOAT(LOWEST)), FLOAT(0.0), value)

    return types.float32(types.float32), codegen
