"""paged_attention on CPUs (what it computes: kernels/reference/paged_attention.py).

Rows: the query rows of one sequence that share a KV head, token-major: row = token · group + head in group.
A decode step of a 9-on-3 model has 3 rows, a prefill chunk of 512 tokens 1,536.

A piece is up to 96 rows of one sequence and a range of its keys. A sequence whose rows fit into one piece
(decode, short chunks) is split at every 256th key and merged by whichever thread ends last. Where it is split
depends on the sequence alone, never on the batch or the number of threads: a sequence gets the same bits
alone and in a full batch.

What a thread takes at a time, a turn, is a piece for several KV heads, the last pieces for one: heads of a
block lie in the same pages of memory, and looking pages up is a good part of what a scattered read costs. Up
to 16 rows are multiplied with keys and values as they lie in the cache; more rows pay for transposing the
keys once. A thread's scratch stays in the second-level cache.

Files: attention_plan (pieces, scratch), attention_turns (a thread), attention_few with spans and
attention_many with tile (a piece), attention_rows with softmax (what both do), columns.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.attention_plan import Job, lay_out, pieces_in, write_pieces
from kernels.cpu.attention_turns import work
from kernels.cpu.jit import GOMP_PARALLEL, GRAIN, jit, parallel, reset
from kernels.cpu.memory import KINDS
from kernels.cpu.workspace import WORKSPACE


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
    if out is None:
        out = torch.empty_like(query)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    query_token, query_head, _ = query.stride()
    out_token, out_head, _ = out.stride()
    key_block, key_head, key_slot, _ = key_cache.stride()
    value_block, value_head, value_slot, _ = value_cache.stride()
    arguments = (
        GOMP_PARALLEL,
        torch.get_num_threads(),
        KINDS[query.dtype],
        KINDS[key_cache.dtype],
        query.data_ptr(),
        out.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        context_lens.numel(),
        query.size(1) // num_kv_heads,
        num_kv_heads,
        block_size,
        head_dim,
        query_token,
        query_head,
        out_token,
        out_head,
        key_block,
        key_head,
        key_slot,
        value_block,
        value_head,
        value_slot,
        block_tables.stride(0),
        scale,
        sliding_window,
        soft_cap,
    )
    address, size = WORKSPACE.place
    while (needed := run(address, size, *arguments)) > size:
        WORKSPACE.grow(needed)
        address, size = WORKSPACE.place
    return out


@jit
def run(workspace: int, workspace_size: int, gomp: int, threads: int, *arguments: Any) -> int:
    """Do the job, or nothing where the workspace is too small. Returns the bytes of workspace it takes."""
    job = Job(*arguments)
    num_pieces, partial_floats, elements = write_pieces(job, pieces_in(workspace), workspace + workspace_size)
    plan = lay_out(job, workspace, num_pieces, partial_floats, threads)
    needed = plan.end - workspace
    if needed > workspace_size:
        return needed
    reset(plan.next_turn)
    reset(plan.next_thread)
    for i in range(num_pieces * job.num_kv_heads):
        reset(plan.finished + i * 8)
    workers = min(threads, plan.num_turns, 1 + elements // GRAIN)
    parallel(gomp, workers, work, (job, plan))
    return needed
