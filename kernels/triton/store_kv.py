"""store_kv on CUDA (what it computes: kernels/reference/store_kv.py). One program per token and KV head."""

import triton
import triton.language as tl
from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot; slots that are not named stay as they are."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    store_kernel[(num_tokens, num_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[2],
        DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


@triton.jit
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token,
    key_head,
    value_token,
    value_head,
    key_cache_block,
    key_cache_head,
    key_cache_slot,
    value_cache_block,
    value_cache_head,
    value_cache_slot,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid (tokens, KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < DIM
    k = tl.load(key + token * key_token + head * key_head + dim, mask=in_head)
    place = block * key_cache_block + head * key_cache_head + offset * key_cache_slot
    tl.store(key_cache + place + dim, k.to(key_cache.dtype.element_ty), mask=in_head)
    v = tl.load(value + token * value_token + head * value_head + dim, mask=in_head)
    place = block * value_cache_block + head * value_cache_head + offset * value_cache_slot
    tl.store(value_cache + place + dim, v.to(value_cache.dtype.element_ty), mask=in_head)
