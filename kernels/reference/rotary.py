"""rotary: rotary position embedding, rotate-half (NeoX) style, alone and fused with store_kv.

    x1' = x1 · cos − x2 · sin        x1, x2 = the two halves of a head
    x2' = x2 · cos + x1 · sin        cos, sin = the halves of cos_sin[position]

query, key  [num_tokens, heads, head_dim]        positions  int64 [num_tokens]
cos_sin     float32 [max_positions, head_dim]: head_dim / 2 cosines, then head_dim / 2 sines
"""

import torch
from torch import Tensor

from kernels.reference.store_kv import store_kv


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate every head of `query` and `key` in place."""
    for heads in (query, key):
        heads.copy_(rotated(heads, positions, cos_sin))


def rotary_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate `query` in place and store the rotated key and the value; `key` itself stays as it was."""
    query.copy_(rotated(query, positions, cos_sin))
    store_kv(rotated(key, positions, cos_sin), value, key_cache, value_cache, slot_mapping)


def rotated(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """A rotated copy of `heads`, rounded to its dtype."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
