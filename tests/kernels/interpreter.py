"""Triton's interpreter, for running its kernels on a CPU.

Its `dot` multiplies the raw bits of bfloat16 as if they were integers; here it gets their values instead.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kernels.backends import Ops, load

plain_dot = interpreter.InterpreterBuilder.create_dot


def dot_of_values(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """create_dot, with bfloat16 operands widened to float32."""
    return plain_dot(builder, widened(a), widened(b), *rest)


def widened(operand: Any) -> Any:
    """A bfloat16 tensor (kept as uint16) as float32; any other as it is."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    values = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def load_interpreted() -> Ops:
    """The Triton backend, interpreted, in checked mode."""
    interpreter.InterpreterBuilder.create_dot = dot_of_values
    return load("triton", checked=True)
