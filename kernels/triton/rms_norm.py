"""rms_norm on CUDA (see kernels/reference/rms_norm.py). One program per row, the row in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the normalised rows in x's dtype; `residual` is updated in place."""
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    summed = x if residual is None else residual
    norm_kernel[(num_rows,)](
        x,
        summed,
        weight,
        out,
        x.stride(0),
        summed.stride(0),
        hidden,
        eps,
        ADDS=residual is not None,
        PADDED=triton.next_power_of_2(hidden),
        num_warps=4 if hidden <= 4096 else 8,
    )
    return out


@triton.jit
def norm_kernel(
    x, summed, weight, out, x_row, summed_row, hidden, eps, ADDS: tl.constexpr, PADDED: tl.constexpr
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < hidden
    values = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        place = summed + row * summed_row + i
        values += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / hidden + eps)
    scaled = values * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + i, scaled.to(out.dtype.element_ty), mask=inside)
