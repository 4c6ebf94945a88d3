"""Attention of one layer: rotate, write new keys and values to the pool, read all through the tables."""

from dataclasses import dataclass

from torch import Tensor

from gpu_runner.batch import Batch
from gpu_runner.kv_cache import LayerCaches
from kernels.backends import Ops


@dataclass(slots=True)
class AttentionInput:
    """What attention needs beside Q, K and V; the same for all layers of a step."""

    batch: Batch
    caches: LayerCaches
    cos_sin: Tensor  # float32 [max_positions, head_dim]
    scale: float
    ops: Ops
    out: Tensor  # [tokens, heads, head_dim]: what `attend` returns, until the next layer


def attend(
    layer: int, query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInput, window: int
) -> Tensor:
    """Query `[tokens, heads, head_dim]` is rotated in place; key and value `[tokens, kv_heads, head_dim]`.

    Returns `inputs.out`. `window` is in tokens; 0 sees everything before.
    """
    batch, ops = inputs.batch, inputs.ops
    key_cache, value_cache = inputs.caches[layer]
    ops.rotary_store_kv(
        query, key, value, key_cache, value_cache, batch.positions, inputs.cos_sin, batch.slot_mapping
    )
    return ops.paged_attention(
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        scale=inputs.scale,
        sliding_window=window,
        out=inputs.out,
    )
