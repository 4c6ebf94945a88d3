"""Compile what a runner will use, before it says that it is ready: each op runs once on one token."""

from collections.abc import Iterator
from functools import partial

import torch

from kernels.backends import Ops


def warm_up(
    ops: Ops,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: str = "cpu",
) -> Iterator[str]:
    """Yield each op's name just before it is compiled (or read from the compiler's cache), to show progress.

    A first start compiles for some seconds per op; a later one takes some tens of milliseconds per op.
    """
    shape = (2, 1, 2, num_kv_heads, block_size, head_dim)
    pool = torch.zeros(shape, dtype=cache_dtype, device=device)
    key_cache, value_cache = pool[:, 0, 0], pool[:, 0, 1]
    query = torch.ones((1, num_query_heads, head_dim), dtype=dtype, device=device)
    key = torch.ones((1, num_kv_heads, head_dim), dtype=dtype, device=device)
    row = torch.ones((1, 2 * head_dim), dtype=dtype, device=device)
    cos_sin = torch.ones((1, head_dim), dtype=torch.float32, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    pairs = torch.tensor([[0, 1]], dtype=torch.int64, device=device)
    yield "store_kv"
    ops.store_kv(key, key, key_cache, value_cache, first)
    yield "rotary"
    ops.rotary(query, key, first, cos_sin)
    yield "rotary_store_kv"
    ops.rotary_store_kv(query, key, key, key_cache, value_cache, first, cos_sin, first)
    yield "rms_norm"
    ops.rms_norm(row, row[0], 1e-5, row.clone())
    yield "silu_mul"
    ops.silu_mul(row)
    yield "copy_blocks"
    ops.copy_blocks(pool, pairs)
    yield "paged_attention"
    attention = partial(ops.paged_attention, scale=1.0)
    attention(query, key_cache, value_cache, table, starts, lengths)
    wide = table.expand(1, 64).contiguous()  # so long a context is split on GPUs
    attention(query, key_cache, value_cache, wide, starts, lengths)
    attention(query.repeat(2, 1, 1), key_cache, value_cache, table, 2 * starts, 2 * lengths)  # a prefill
