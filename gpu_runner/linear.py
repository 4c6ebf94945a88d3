"""The matrix products of the model.

Widening: on processors whose bfloat16 instructions run at no more than float32's rate, torch's bfloat16
product of many rows takes up to twice the time of its float32 one. There, a product of many rows turns its
weight to float32 first (a temporary of one matrix): faster, and no less exact. Whether it pays is measured.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEN_ROWS = 128  # below this, converting a weight costs more than a faster product gains


class Linear:
    """y = x · weightᵀ (+ bias); weight `[out, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._widen = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and widening_pays()

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`, in x's dtype."""
        if self._widen and x.shape[0] >= WIDEN_ROWS:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        return F.linear(x, self.weight, self.bias)


@cache
def widening_pays() -> bool:
    """Whether a product of many rows is faster in float32, conversion included; measured once, in 50 ms."""
    x, weight = (
        torch.zeros(2 * WIDEN_ROWS, 768, dtype=torch.bfloat16),
        torch.zeros(768, 768, dtype=torch.bfloat16),
    )
    narrow, wide = [], []
    for _ in range(5):
        began = time.perf_counter()
        F.linear(x, weight)
        middle = time.perf_counter()
        F.linear(x.float(), weight.float()).to(x.dtype)
        narrow.append(middle - began)
        wide.append(time.perf_counter() - middle)
    return min(wide) < 0.9 * min(narrow)
