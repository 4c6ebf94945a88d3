"""The matrix products of the model: torch's, or those of kernels/cpu/linear.py where they are faster.

On CPUs whose bfloat16 instructions are no faster than float32's, torch's 16-bit products take up to twice the
time of ours, which compute in float32 from 16-bit weights. With matrix units (AMX), torch's are far faster.
Which holds is measured, once per process and dtype; then the weights are kept in that form only.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import linear as cpu

TRIAL_ROWS, TRIAL_SIZE = 32, 768  # a decode step's rows, a small model's width
TRIALS = 7


class Linear:
    """y = x · weightᵀ (+ bias); weight `[out, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # the packed form after `prepare`, if that is faster
        self.bias = bias
        self.outputs = weight.shape[0]
        self.is_packed = False

    def prepare(self) -> None:
        """Bring the weight, now that it holds its values, into the form that is multiplied fastest."""
        if (
            self.weight.device.type == "cpu"
            and self.weight.dtype.itemsize == 2
            and packing_pays(self.weight.dtype)
        ):
            self.weight = cpu.pack(self.weight)
            self.is_packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`, in x's dtype."""
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        y = cpu.linear(x, self.weight, self.outputs)
        return y if self.bias is None else y.add_(self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, `[count, in]`: a tied embedding is read through its output matrix."""
        if not self.is_packed:
            return F.embedding(indices, self.weight)
        return self.weight[indices // cpu.WIDTH, :, indices % cpu.WIDTH]


@cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Whether our product of a decode step's rows is faster than torch's here; measured in milliseconds."""
    x = torch.ones(TRIAL_ROWS, TRIAL_SIZE, dtype=dtype)
    weight = torch.ones(TRIAL_SIZE, TRIAL_SIZE, dtype=dtype)
    packed = cpu.pack(weight)
    theirs, ours = [], []
    for _ in range(TRIALS):
        began = time.perf_counter()
        F.linear(x, weight)
        middle = time.perf_counter()
        cpu.linear(x, packed, TRIAL_SIZE)
        theirs.append(middle - began)
        ours.append(time.perf_counter() - middle)
    return min(ours) < 0.9 * min(theirs)
