"""paged_attention on CUDA (what it computes: kernels/reference/paged_attention.py).

Program (query tile, KV head, split): `rows` query rows of one sequence, token-major, the query group padded
to a power of two: decode packs the whole group of a KV head into one tile. A program finds its sequence by
bisection of query_start: tables and lengths are read on the device, the grid depends on shapes only, so that
a step can be captured in a CUDA graph.

A step with at most one token per sequence is a decode: it is split over the keys as far as that fills the GPU
(split-KV), each split writes its maximum, sum and weighted values, and `merge_kernel` merges them stably.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configs import Config, capability, config_for

MAX_SPLITS = 32
WAVES = 2  # programs per multiprocessor that splitting aims at
PARTIAL_EXTRA = 4  # floats behind a row's sums: its maximum, its sum of weights, two that align the next row
VARYING = ["num_seqs", "num_tokens", "splits", "table_row"]
"""Arguments that differ from step to step: compiled for once, not anew where one is 1 or a multiple of 16."""


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
) -> Tensor:
    """Return `out`, shaped as `query`; rows that belong to no sequence are left as they were."""
    out = torch.empty_like(query) if out is None else out
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = context_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    num_kv_heads, block_size = key_cache.shape[1:3]
    major, processors = capability(query.device)
    decode = num_tokens <= num_seqs
    config = config_for(major, "decode" if decode else "prefill", head_dim)
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    rows = max(config.rows, padded_group)
    num_tiles = num_tokens // (rows // padded_group) + num_seqs
    splits = 1
    if decode:
        width = block_tables.shape[1] * block_size
        keys = min(sliding_window, width) if sliding_window else width
        splits = count_splits(num_seqs * num_kv_heads, keys // config.tile, processors)
    partial_shape = (splits, num_tokens, num_heads, head_dim + PARTIAL_EXTRA)
    partial = out if splits == 1 else torch.empty(partial_shape, dtype=torch.float32, device=query.device)
    attention_kernel[(num_tiles, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        context_lens,
        out,
        partial,
        num_seqs,
        num_tokens,
        splits,
        float(scale),
        float(soft_cap),
        *query.stride()[:2],
        *out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        **constants(query, key_cache, config, group, sliding_window, soft_cap, splits > 1),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        merge(partial, out, query_start, splits)
    return out


def merge(partial: Tensor, out: Tensor, query_start: Tensor, splits: int) -> None:
    """Write the merged result of the splits to `out`."""
    num_tokens, num_heads, head_dim = out.shape
    merge_kernel[(query_start.shape[0] - 1, num_heads)](
        partial,
        out,
        query_start,
        num_tokens,
        splits,
        *out.stride()[:2],
        HEADS=num_heads,
        DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        MOST_SPLITS=MAX_SPLITS,
        EXTRA=PARTIAL_EXTRA,
        num_warps=4,
    )


def constants(
    query: Tensor,
    key_cache: Tensor,
    config: Config,
    group: int,
    sliding_window: int,
    soft_cap: float,
    is_split: bool,
) -> dict[str, int | bool]:
    """What the attention kernel is compiled for."""
    padded_group = triton.next_power_of_2(group)
    return {
        "GROUP": group,
        "PADDED_GROUP": padded_group,
        "HEADS": query.shape[1],
        "DIM": query.shape[2],
        "PADDED_DIM": triton.next_power_of_2(query.shape[2]),
        "BLOCK_SIZE": key_cache.shape[2],
        "ROWS": max(config.rows, padded_group),
        "TILE": config.tile,
        "WINDOW": sliding_window,
        "CAPPED": soft_cap > 0,
        "SPLIT": is_split,
        "EXTRA": PARTIAL_EXTRA,
    }


def count_splits(programs: int, tiles: int, processors: int) -> int:
    """Splits that fill the GPU `WAVES` times over, of at least two tiles of keys each."""
    return max(1, min(MAX_SPLITS, -(-WAVES * processors // programs), tiles // 2))


@triton.jit
def find_sequence(query_start, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence of a query tile: the last whose first tile, start // TOKENS + sequence, is not beyond."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=VARYING)
def attention_kernel(
    query, key_cache, value_cache, block_tables, query_start, context_lens, out, partial,
    num_seqs, num_tokens, splits, scale, soft_cap, query_token, query_head, out_token, out_head,
    key_block, key_head, key_slot, value_block, value_head, value_slot, table_row,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, KV heads, splits)."""
    TOKENS: tl.constexpr = ROWS // PADDED_GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last rows see most keys: they start first
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = find_sequence(query_start, num_seqs, tile, TOKENS)
    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    first_token = (tile - (start // TOKENS + sequence)) * TOKENS
    if first_token >= length:
        return
    context = tl.load(context_lens + sequence)
    row = tl.arange(0, ROWS)
    token = first_token + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    used = (token < length) & (row % PADDED_GROUP < GROUP)
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < DIM
    query_rows = query + (start + token).to(tl.int64) * query_token + head * query_head
    q = tl.load(query_rows[:, None] + dim[None, :], mask=used[:, None] & in_head[None, :], other=0.0)
    # This split's keys: equal whole tiles of what the tile's rows can see.
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context - length + first_token - WINDOW + 1, 0) // TILE * TILE
    high = tl.minimum(context, context - length + first_token + TOKENS)
    span = tl.cdiv(tl.cdiv(high - low, TILE), splits) * TILE
    low = low + split * span
    high = tl.minimum(high, low + span)
    key_strides = (key_block, key_slot)
    value_strides = (value_block, value_slot)
    keys, values = key_cache + kv_head * key_head, value_cache + kv_head * value_head
    table = block_tables + sequence.to(tl.int64) * table_row
    position = context - length + token
    factors = (scale, soft_cap)
    sums, best, total = attend_keys(
        q, position, table, low, high, keys, values, key_strides, value_strides, factors,
        in_head, dim, ROWS, PADDED_DIM, BLOCK_SIZE, TILE, WINDOW, CAPPED,
    )  # fmt: skip
    total = tl.where(used, total, 1.0)  # rows that are only padding have seen no key
    written = used[:, None] & in_head[None, :]
    if SPLIT:
        place = (split * num_tokens + start + token).to(tl.int64) * HEADS + head
        partial_rows = partial + place * (DIM + EXTRA)
        tl.store(partial_rows[:, None] + dim[None, :], sums, mask=written)
        tl.store(partial_rows + DIM, best, mask=used)
        tl.store(partial_rows + DIM + 1, total, mask=used)
    else:
        out_rows = out + (start + token).to(tl.int64) * out_token + head * out_head
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out_rows[:, None] + dim[None, :], result, mask=written)


@triton.jit
def tanh(x):
    """Near 0, where 1 − … would cancel, by its Taylor series; see kernels/cpu/exponential.py."""
    square = x * x
    near = square * (-1382 / 155925) + 62 / 2835
    near = ((near * square - 17 / 315) * square + 2 / 15) * square - 1 / 3
    near = x * (near * square + 1.0)
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * 1.4426950408889634)) + 1.0)
    return tl.where(square < 0.16, near, far)


@triton.jit
def attend_keys(
    q, position, table, low, high, keys, values, key_strides, value_strides, factors, in_head, dim,
    ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows over keys [low, high): weighted values, maxima (base 2), sums of weights."""
    scale, soft_cap = factors
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for first_key in range(low, high, TILE):
        key = first_key + tl.arange(0, TILE)
        there = key < high
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        loaded = there[:, None] & in_head[None, :]
        key_rows = keys + block * key_strides[0] + slot * key_strides[1]
        k = tl.load(key_rows[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = soft_cap * tanh(scores / soft_cap)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # no key seen yet
        weights = tl.exp2(scores - shift[:, None])
        factor = tl.exp2(best - shift)
        total = total * factor + tl.sum(weights, 1)
        value_rows = values + block * value_strides[0] + slot * value_strides[1]
        v = tl.load(value_rows[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        sums = tl.dot(weights.to(q.dtype), v, sums * factor[:, None], input_precision="ieee")
        best = new_best
    return sums, best, total


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    partial,
    out,
    query_start,
    num_tokens,
    splits,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """Grid (sequences, heads): out = Σ f · sums / Σ f · total over splits, f = exp2(best − maximum)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, MOST_SPLITS)
    made = split < splits
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < DIM
    start = tl.load(query_start + sequence)
    for index in range(tl.load(query_start + sequence + 1) - start):
        token = start + index
        place = (split * num_tokens + token).to(tl.int64) * HEADS + head
        rows = partial + place * (DIM + EXTRA)
        best = tl.load(rows + DIM, mask=made, other=float("-inf"))
        factor = tl.exp2(best - tl.max(best, 0))
        total = tl.sum(tl.load(rows + DIM + 1, mask=made, other=0.0) * factor, 0)
        sums = tl.load(rows[:, None] + dim[None, :], mask=made[:, None] & in_head[None, :], other=0.0)
        merged = tl.sum(sums * factor[:, None], 0) / total
        out_row = out + token.to(tl.int64) * out_token + head * out_head
        tl.store(out_row + dim, merged.to(out.dtype.element_ty), mask=in_head)
