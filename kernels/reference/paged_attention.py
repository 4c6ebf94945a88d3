"""paged_attention: causal grouped-query attention over a mixed batch, reading the cache through block tables.

For query row i of a sequence with query length q and context length c, at position p = c − q + i, head h:

    score[k] = scale · query[i, h] · key[k, h // group]        for k ≤ p and, with a window w > 0, p − k < w
    score[k] = cap · tanh(score[k] / cap)                       with a soft cap > 0
    out[i, h] = Σ softmax(score)[k] · value[k, h // group]

query         [num_tokens, num_query_heads, head_dim]; the sequences' rows one after the other
*_cache       [num_blocks, num_kv_heads, block_size, head_dim]: strided views of one layer of the pool;
              block_size is a multiple of 8, head_dim of 16; what sequences stored is finite
block_tables  int32 [num_seqs, max_blocks]: logical block → block_id; entries past the context are never read
query_start   int32 [num_seqs + 1]: sequence s has rows query_start[s] : query_start[s + 1], perhaps none
context_lens  int32 [num_seqs]: tokens in the cache, this step's included (0 only without query rows)
"""

import torch
from torch import Tensor


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
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for index, context in enumerate(contexts):
        rows = slice(starts[index], starts[index + 1])
        if rows.start == rows.stop:
            continue
        keys = gather(key_cache, block_tables[index], context).float()
        values = gather(value_cache, block_tables[index], context).float()
        attended = attend(query[rows].float().transpose(0, 1), keys, values, scale, sliding_window, soft_cap)
        out[rows] = attended.transpose(0, 1).to(out.dtype)
    return out


def gather(cache: Tensor, block_table: Tensor, context: int) -> Tensor:
    """The first `context` tokens of one sequence, contiguous: [num_kv_heads, context, head_dim]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    num_blocks = -(-context // block_size)
    blocks = cache[block_table[:num_blocks].long()]
    return blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)[:, :context]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int, soft_cap: float
) -> Tensor:
    """Dense attention of one sequence: query [heads, q, dim] over keys, values [kv_heads, context, dim]."""
    group = query.shape[0] // keys.shape[0]
    num_rows, context = query.shape[1], keys.shape[1]
    scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row_positions = torch.arange(context - num_rows, context, device=query.device)[:, None]
    key_positions = torch.arange(context, device=query.device)[None, :]
    hidden = key_positions > row_positions
    if sliding_window > 0:
        hidden |= row_positions - key_positions >= sliding_window
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values.repeat_interleave(group, 0)
