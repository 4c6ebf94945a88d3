"""Speed of the CPU kernels, as ratios measured in one run: `python -m tests.bench.bench_kernels`.

All rivals of a case take turns, round by round, and each one's best round counts: what else runs on the
machine then touches all alike. The caches are as large as a real pool's; each call takes the next layer, as
a step does.
"""

import itertools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.backends import Ops, load

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 9, 3, 64, 16, 30
SCALE = HEAD_DIM**-0.5
ROUNDS = 60


def best_times(rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each rival's best round."""
    best = dict.fromkeys(rivals, float("inf"))
    for number in range(rounds + 2):
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            if number >= 2:  # the first two warm up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def make_pool(num_blocks: int) -> Tensor:
    return torch.randn(num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(torch.bfloat16)


def decode(ops: Ops) -> dict[str, float]:
    """32 sequences of 256 tokens: against gather + dense attention, and a sum over as many bytes."""
    sequences, context = 32, 256
    blocks = sequences * context // BLOCK_SIZE
    pool = make_pool(blocks)
    tables = torch.randperm(blocks).view(sequences, -1).to(torch.int32)
    long_tables = tables.long()
    query = torch.randn(sequences, QUERY_HEADS, HEAD_DIM).to(torch.bfloat16)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    contexts = torch.full((sequences,), context, dtype=torch.int32)
    read_bytes = sequences * context * 2 * KV_HEADS * HEAD_DIM * 2
    plain = [torch.randn(read_bytes // 4) for _ in range(LAYERS)]
    layers = itertools.cycle(range(LAYERS))

    def paged() -> Tensor:
        layer = next(layers)
        caches = pool[:, layer, 0], pool[:, layer, 1]
        return ops.paged_attention(query, *caches, tables, starts, contexts, scale=SCALE)

    def gathered() -> Tensor:
        layer = next(layers)
        keys, values = (
            pool[:, layer, part][long_tables].transpose(1, 2).reshape(sequences, KV_HEADS, context, HEAD_DIM)
            for part in (0, 1)
        )
        return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    assert torch.allclose(paged().float(), gathered_at(gathered, layers).float(), atol=0.02)
    return best_times(
        {"paged": paged, "gathered": gathered, "sum": lambda: plain[next(layers)].sum()}, ROUNDS
    )


def gathered_at(gathered: Callable[[], Tensor], layers: "itertools.cycle[int]") -> Tensor:
    """The rival's result for the layer that was just used: the cycle is turned once around."""
    for _ in range(LAYERS - 1):
        next(layers)
    return gathered()


def prefill(ops: Ops) -> dict[str, float]:
    """512 new tokens on a cached prefix of 1,024: against dense attention on contiguous tensors."""
    new, context = 512, 1536
    pool = make_pool(context // BLOCK_SIZE)
    tables = torch.randperm(context // BLOCK_SIZE).view(1, -1).to(torch.int32)
    query = torch.randn(new, QUERY_HEADS, HEAD_DIM).to(torch.bfloat16)
    starts = torch.tensor([0, new], dtype=torch.int32)
    contexts = torch.tensor([context], dtype=torch.int32)
    key_cache, value_cache = pool[:, 3, 0], pool[:, 3, 1]
    keys, values = (
        cache[tables[0].long()].transpose(0, 1).reshape(1, KV_HEADS, context, HEAD_DIM).contiguous()
        for cache in (key_cache, value_cache)
    )
    rows = query.transpose(0, 1)[None].contiguous()
    visible = torch.ones(new, context, dtype=torch.bool).tril(context - new)

    def paged() -> Tensor:
        return ops.paged_attention(query, key_cache, value_cache, tables, starts, contexts, scale=SCALE)

    def dense() -> Tensor:
        return scaled_dot_product_attention(rows, keys, values, attn_mask=visible, enable_gqa=True)

    wide = {name: tensor.repeat_interleave(3, 1) for name, tensor in (("keys", keys), ("values", values))}

    def dense_expanded() -> Tensor:
        return scaled_dot_product_attention(rows, wide["keys"], wide["values"], attn_mask=visible)

    assert torch.allclose(paged().float(), dense()[0].transpose(0, 1).float(), atol=0.02)
    return best_times({"paged": paged, "dense": dense, "dense expanded": dense_expanded}, ROUNDS // 3)


def overhead(ops: Ops) -> dict[str, float]:
    """One token through the ops that a layer calls: what a call costs beside its work."""
    pool = make_pool(2)
    caches = pool[:, 0, 0], pool[:, 0, 1]
    query = torch.ones(1, QUERY_HEADS, HEAD_DIM).to(torch.bfloat16)
    key = torch.ones(1, KV_HEADS, HEAD_DIM).to(torch.bfloat16)
    row, weight = torch.ones(1, 576).to(torch.bfloat16), torch.ones(576).to(torch.bfloat16)
    gate_up = torch.ones(1, 3072).to(torch.bfloat16)
    position, cos_sin = torch.zeros(1, dtype=torch.int64), torch.ones(1, HEAD_DIM) * 0.5**0.5
    table, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    rivals: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: ops.rms_norm(row, weight, 1e-5, row),
        "silu_mul": lambda: ops.silu_mul(gate_up),
        "rotary_store_kv": lambda: ops.rotary_store_kv(query, key, key, *caches, position, cos_sin, position),
        "paged_attention": lambda: ops.paged_attention(query, *caches, table, starts, one, scale=SCALE),
    }
    return best_times(rivals, 500)


def main() -> int:
    """Print the ratios; the exit status says whether all marks were reached."""
    ops = load("cpu")
    times = decode(ops)
    of_gathered, of_sum = times["gathered"] / times["paged"], times["sum"] / times["paged"]
    print(f"threads {torch.get_num_threads()}")
    print(f"decode, 32 × 256 tokens: {times['paged'] * 1e6:.0f} µs")
    print(f"  {of_gathered:.1f} times as fast as gather + dense attention (mark: 6)")
    print(f"  {of_sum:.2f} of the speed of a threaded sum over as many bytes (mark: 0.5)")
    times = prefill(ops)
    of_dense = min(times["dense"], times["dense expanded"]) / times["paged"]
    print(f"prefill, 512 on 1,024 tokens: {times['paged'] * 1e3:.2f} ms")
    print(f"  {of_dense:.2f} times as fast as dense attention on contiguous tensors (mark: 1)")
    for name, seconds in overhead(ops).items():
        print(f"{name} of one token: {seconds * 1e6:.1f} µs")
    return 0 if of_gathered >= 6 and of_sum >= 0.5 and of_dense >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
