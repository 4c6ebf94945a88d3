"""Checked mode: the ops of a backend behind checks of everything they take for granted.

Off, nothing of this runs. On, each call costs some host synchronisation, and bad input raises an error that
names the tensor: TypeError for a dtype, ValueError for all else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INT32, INT64 = (torch.int32,), (torch.int64,)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
) -> None:
    """The dtype is one of `dtypes`, the shape as given (None: any), the last dimension contiguous."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(known) for known in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {allowed}")
    fits = len(shape) == tensor.dim() and all(
        wanted in (None, got) for wanted, got in zip(shape, tensor.shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
    contiguous = tensor.numel() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    require(contiguous, f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def check_range(name: str, tensor: Tensor, low: int, high: int) -> None:
    """Every value is in [low, high)."""
    if tensor.numel() == 0:
        return
    smallest, largest = int(tensor.min()), int(tensor.max())
    require(
        low <= smallest and largest < high,
        f"{name} has values from {smallest} to {largest}, expected {low} to {high - 1}",
    )


def check_device(**tensors: Tensor) -> None:
    """All lie on the device of the first."""
    first, *others = tensors.items()
    for name, tensor in others:
        expected = first[1].device
        require(tensor.device == expected, f"{name} is on {tensor.device}, but {first[0]} is on {expected}")


def check_caches(key_cache: Tensor, value_cache: Tensor, num_kv_heads: int | None, head_dim: int) -> None:
    """Both caches have one shape and dtype, with whole vectors per head and blocks of whole eights."""
    check_tensor("key_cache", key_cache, FLOATS, (None, num_kv_heads, None, head_dim))
    check_tensor("value_cache", value_cache, (key_cache.dtype,), tuple(key_cache.shape))
    require(
        min(key_cache.shape[1:]) > 0, f"key_cache has shape {list(key_cache.shape)}, expected sizes over 0"
    )
    require(head_dim % 16 == 0, f"key_cache has head_dim {head_dim}, expected a multiple of 16")
    block_size = key_cache.shape[2]
    require(block_size % 8 == 0, f"key_cache has block size {block_size}, expected a multiple of 8")


def check_slots(slot_mapping: Tensor, key_cache: Tensor, num_tokens: int) -> None:
    """One slot per token, in range or −1, none twice."""
    check_tensor("slot_mapping", slot_mapping, INT64, (num_tokens,))
    check_range("slot_mapping", slot_mapping, -1, key_cache.shape[0] * key_cache.shape[2])
    named = slot_mapping[slot_mapping >= 0].tolist()
    distinct = len(set(named)) == len(named)
    require(distinct, "slot_mapping names a slot twice, expected distinct slots")


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Check the arguments of store_kv."""
    check_device(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
    )
    check_tensor("key", key, FLOATS, (None, None, None))
    check_tensor("value", value, (key.dtype,), tuple(key.shape))
    check_caches(key_cache, value_cache, key.shape[1], key.shape[2])
    check_slots(slot_mapping, key_cache, key.shape[0])


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> None:
    """Check the arguments of paged_attention."""
    check_device(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start=query_start,
        context_lens=context_lens,
        out=query if out is None else out,
    )
    check_tensor("query", query, FLOATS, (None, None, None))
    check_caches(key_cache, value_cache, None, query.shape[2])
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    divides = num_heads % num_kv_heads == 0
    require(divides, f"query has {num_heads} heads, expected a multiple of key_cache's {num_kv_heads}")
    if out is not None:
        check_tensor("out", out, (query.dtype,), tuple(query.shape))
    check_tensor("context_lens", context_lens, INT32, (None,))
    num_seqs = context_lens.shape[0]
    check_tensor("query_start", query_start, INT32, (num_seqs + 1,))
    check_tensor("block_tables", block_tables, INT32, (num_seqs, None))
    require(scale > 0, f"scale is {scale}, expected a positive number")
    require(sliding_window >= 0, f"sliding_window is {sliding_window}, expected 0 (none) or more")
    require(soft_cap >= 0, f"soft_cap is {soft_cap}, expected 0 (none) or more")
    check_sequences(query.shape[0], key_cache, block_tables, query_start, context_lens)


def check_sequences(
    num_tokens: int, key_cache: Tensor, block_tables: Tensor, query_start: Tensor, context_lens: Tensor
) -> None:
    """Rows lie in the query in order, contexts hold them, tables name a block for every token."""
    num_blocks, _, block_size, _ = key_cache.shape
    starts = query_start.tolist()
    require(starts[0] == 0, f"query_start begins with {starts[0]}, expected 0")
    require(starts[-1] <= num_tokens, f"query_start ends with {starts[-1]}, but query has {num_tokens} rows")
    for index, context in enumerate(context_lens.tolist()):
        length = starts[index + 1] - starts[index]
        require(length >= 0, f"query_start falls at sequence {index}, expected rising values")
        if length == 0:
            continue
        require(
            context >= length,
            f"context_lens[{index}] is {context}, expected at least the {length} rows of that sequence",
        )
        needed, given = -(-context // block_size), block_tables.shape[1]
        require(
            needed <= given,
            f"block_tables has {given} blocks for sequence {index}, but {context} tokens need {needed}",
        )
        check_range(f"block_tables[{index}]", block_tables[index, :needed], 0, num_blocks)


def check_pairs(pairs: Tensor, num_sources: int, num_destinations: int) -> None:
    """Pairs of blocks in range, no destination twice."""
    check_tensor("pairs", pairs, INT64, (None, 2))
    check_range("pairs[:, 0]", pairs[:, 0], 0, num_sources)
    check_range("pairs[:, 1]", pairs[:, 1], 0, num_destinations)
    distinct = len(set(pairs[:, 1].tolist())) == pairs.shape[0]
    require(distinct, "pairs names a destination twice, expected distinct destinations")


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Check the arguments of copy_blocks."""
    check_tensor("pool", pool, FLOATS, (None,) * 6)
    check_pairs(pairs, pool.shape[0], pool.shape[0])
    both = torch.isin(pairs[:, 1], pairs[:, 0]).any()
    require(not both, "pairs names a block as source and as destination, expected either")


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Check the arguments of swap_blocks."""
    check_tensor("source", source, FLOATS, (None,) * 6)
    check_tensor("destination", destination, (source.dtype,), (None, *source.shape[1:]))
    check_pairs(pairs, source.shape[0], destination.shape[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    """Check the arguments of rms_norm."""
    check_tensor("x", x, FLOATS, (None, None))
    check_tensor("weight", weight, FLOATS, (x.shape[1],))
    check_device(x=x, weight=weight)
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), tuple(x.shape))
        check_device(x=x, residual=residual)
    require(eps >= 0, f"eps is {eps}, expected 0 or more")


def silu_mul(gate_up: Tensor) -> None:
    """Check the argument of silu_mul."""
    check_tensor("gate_up", gate_up, FLOATS, (None, None))
    width = gate_up.shape[1]
    require(width % 2 == 0, f"gate_up has {width} columns, expected an even number")


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Check the arguments of rotary."""
    check_device(query=query, key=key, positions=positions, cos_sin=cos_sin)
    check_tensor("query", query, FLOATS, (None, None, None))
    check_tensor("key", key, (query.dtype,), (query.shape[0], None, query.shape[2]))
    check_tensor("positions", positions, INT64, (query.shape[0],))
    check_tensor("cos_sin", cos_sin, (torch.float32,), (None, query.shape[2]))
    check_range("positions", positions, 0, cos_sin.shape[0])


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
    """Check the arguments of rotary_store_kv."""
    rotary(query, key, positions, cos_sin)
    store_kv(key, value, key_cache, value_cache, slot_mapping)


CHECKS: dict[str, Any] = {
    check.__name__: check
    for check in (
        store_kv,
        paged_attention,
        copy_blocks,
        swap_blocks,
        rms_norm,
        silu_mul,
        rotary,
        rotary_store_kv,
    )
}
