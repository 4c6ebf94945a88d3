"""rms_norm: root-mean-square normalisation, with the residual addition before it fused in.

    residual ← residual + x                                     (only with a residual; rounded to its dtype)
    out = y / sqrt(mean(y²) + eps) · weight                     y = residual, or x without one

x, residual  [num_tokens, hidden]        weight  [hidden]
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the normalised rows in x's dtype; `residual` is updated in place."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
