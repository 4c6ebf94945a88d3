"""paged_attention on CPUs (what it computes: kernels/reference/paged_attention.py).

Rows: the query rows of one sequence that share a KV head, token-major: row = token · group + head in group.
A decode step of a 9-on-3 model has 3 rows, a prefill chunk of 512 tokens 1,536.

Work item: (piece, KV head); a piece is up to 96 rows of one sequence and a range of its keys. A sequence
whose rows fit into one piece (decode, short chunks) is split at every 256th key and merged by whichever
thread ends last. Where it is split depends on the sequence alone, never on the batch or the number of
threads: a sequence gets the same bits alone and in a full batch.

Per item, keys go by in tiles of 64 (128 for up to 4 rows): scores = rows · keysᵀ, online softmax, sums =
sums · rescale + weights · values. Many rows pay for transposing a tile's keys once, to float32 scratch; up to
4 rows, as in decoding, are multiplied with the keys as they lie. An item's scratch stays in the second-level
cache.

A thread takes the KV heads of a piece one after the other (where there are pieces enough): they lie in the
same pages of memory, and looking pages up is a good part of what a scattered read costs.

Files: attention_plan (pieces, scratch), attention_piece (one item), tile (inner loops), columns, softmax.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.attention_piece import work
from kernels.cpu.attention_plan import NOWHERE, Job, lay_out, write_pieces
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
        len(context_lens),
        query.shape[1] // num_kv_heads,
        num_kv_heads,
        block_size,
        head_dim,
        *query.stride()[:2],
        *out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        scale,
        sliding_window,
        soft_cap,
    )
    while (needed := run(WORKSPACE.address, WORKSPACE.size, *arguments)) > WORKSPACE.size:
        WORKSPACE.grow(needed)
    return out


@jit
def run(workspace: int, workspace_size: int, gomp: int, threads: int, *arguments: Any) -> int:
    """Do the job, or nothing where the workspace is too small. Returns the bytes of workspace it takes."""
    job = Job(*arguments)
    num_pieces, partial_floats, elements = write_pieces(job, NOWHERE)
    plan = lay_out(job, workspace, num_pieces, partial_floats, threads)
    needed = plan.end - workspace
    if needed > workspace_size:
        return needed
    write_pieces(job, plan.pieces)
    reset(plan.next_turn)
    reset(plan.next_thread)
    for i in range(num_pieces * job.num_kv_heads):
        reset(plan.finished + i * 8)
    workers = min(threads, num_pieces * job.num_kv_heads, 1 + elements // GRAIN)
    parallel(gomp, workers, work, (job, plan))
    return needed
