"""silu_mul on CUDA (see kernels/reference/silu_mul.py). One program per row and 1,024 columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, computed in float32 and rounded once."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, COLUMNS))
        silu_kernel[grid](gate_up, out, gate_up.stride(0), width, COLUMNS=COLUMNS, num_warps=4)
    return out


@triton.jit
def silu_kernel(gate_up, out, gate_up_row, width, COLUMNS: tl.constexpr):
    """Grid (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = i < width
    gate = tl.load(gate_up + row * gate_up_row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_row + width + i, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + i, result.to(out.dtype.element_ty), mask=inside)
