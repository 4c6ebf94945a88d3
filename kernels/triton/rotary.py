"""rotary and rotary_store_kv on CUDA (see kernels/reference/rotary.py). One program per token and head."""

import triton
import triton.language as tl
from torch import Tensor


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate every head of `query` and `key` in place."""
    for heads in (query, key):
        rotate(heads, positions, cos_sin)


def rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate every head in place."""
    num_tokens, num_heads, head_dim = heads.shape
    if num_tokens == 0:
        return
    rotate_kernel[(num_tokens, num_heads)](
        heads,
        positions,
        cos_sin,
        *heads.stride()[:2],
        cos_sin.stride(0),
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


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
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens == 0:
        return
    rotate_store_kernel[(num_tokens, num_query_heads + num_kv_heads)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        positions,
        cos_sin,
        slot_mapping,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        cos_sin.stride(0),
        QUERY_HEADS=num_query_heads,
        BLOCK_SIZE=key_cache.shape[2],
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


@triton.jit
def rotated(source, cos_sin, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """Both halves of one head, rotated, as float32."""
    i = tl.arange(0, PADDED_HALF)
    inside = i < HALF
    first = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + i, mask=inside, other=0.0)
    sin = tl.load(cos_sin + HALF + i, mask=inside, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_halves(place, first, second, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """Write both halves of one head, rounded to the destination's dtype."""
    i = tl.arange(0, PADDED_HALF)
    inside = i < HALF
    tl.store(place + i, first.to(place.dtype.element_ty), mask=inside)
    tl.store(place + HALF + i, second.to(place.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    heads,
    positions,
    cos_sin,
    heads_token,
    heads_head,
    cos_sin_row,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Grid (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    place = heads + token * heads_token + tl.program_id(1) * heads_head
    first, second = rotated(place, cos_sin + tl.load(positions + token) * cos_sin_row, HALF, PADDED_HALF)
    store_halves(place, first, second, HALF, PADDED_HALF)


@triton.jit
def rotate_store_kernel(
    query,
    key,
    value,
    key_cache,
    value_cache,
    positions,
    cos_sin,
    slot_mapping,
    query_token,
    query_head,
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
    cos_sin_row,
    QUERY_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Grid (tokens, query heads then KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    angles = cos_sin + tl.load(positions + token) * cos_sin_row
    if index < QUERY_HEADS:
        place = query + token * query_token + index * query_head
        first, second = rotated(place, angles, HALF, PADDED_HALF)
        store_halves(place, first, second, HALF, PADDED_HALF)
        return
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = index - QUERY_HEADS
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    first, second = rotated(key + token * key_token + head * key_head, angles, HALF, PADDED_HALF)
    place = block * key_cache_block + head * key_cache_head + offset * key_cache_slot
    store_halves(key_cache + place, first, second, HALF, PADDED_HALF)
    i = tl.arange(0, PADDED_HALF)
    source = value + token * value_token + head * value_head
    place = block * value_cache_block + head * value_cache_head + offset * value_cache_slot
    first = tl.load(source + i, mask=i < HALF)
    second = tl.load(source + HALF + i, mask=i < HALF)
    store_halves(value_cache + place, first, second, HALF, PADDED_HALF)
