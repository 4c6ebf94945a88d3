"""Speed of the CPU kernels, as ratios measured in one run: `python -m tests.bench.bench_kernels`.

How a case is measured, and why:

- All rivals of a case take turns, round by round, in another order each round: what changes slowly (clock
  rate, who else uses the memory) touches all alike, and none always finds the caches that the same one left.
- A ratio is the median over rounds of the two times of one round. A best time would compare a lucky moment
  of one rival with another moment of the other one.
- A call in which a thread of this process had to wait for a core is made again (Linux says so: run delay in
  /proc/self/task/*/schedstat), and does not count. Threads that share work are as fast as the last one, so
  such a call takes a time slice of the scheduler, several milliseconds, whatever it computes. That waiting
  alone decides, never how long a call took. Where too few rounds are left, all count, and the line says
  "disturbed".
- The caches are as large as a real pool's, and each call takes the next layer, as a step does: keys and
  values come from memory, as they would.

Rivals of decoding: the blocks gathered, then `scaled_dot_product_attention`, in three forms. Plain indexing
by the block tables for the whole batch; a sequence at a time, which needs no equal lengths; and the best form
known here, one `index_select` into the final layout, with the query group as rows of one head. Equal lengths
spare the batched forms a mask. The sum over as many bytes only reads, in one stream.
"""

import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.backends import Ops, load

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 9, 3, 64, 16, 30
GROUP, SCALE = QUERY_HEADS // KV_HEADS, HEAD_DIM**-0.5
ENOUGH, FEWEST = 200, 25  # rounds that are made, and that must be undisturbed for the others not to count
PAGE = 4096  # bytes
TIMES = 6  # that decoding is as fast as gathering and dense attention, at least
LONGEST = 30.0  # seconds for one case
TRIES = 4  # calls to get an undisturbed one
WAIT = 0.02  # of a call's time: so much waiting for a core is no disturbance

Rivals = dict[str, Callable[[], object]]


class Call(NamedTuple):
    """One measured call."""

    seconds: float
    quiet: bool  # no thread had to wait


class Case:
    """The times of rivals that took turns."""

    def __init__(self, rivals: Rivals) -> None:
        self.rounds: list[dict[str, Call]] = []
        for call in [*rivals.values()] * 2:
            call()  # compiles, starts threads
        waiting = Waiting()
        order = list(rivals.items())
        end = time.perf_counter() + LONGEST
        while len(self.rounds) < ENOUGH and time.perf_counter() < end:
            random.shuffle(order)
            self.rounds.append({name: measure(call, waiting) for name, call in order})

    def seconds(self, name: str) -> float:
        """Median time of a rival."""
        return median(calls[name].seconds for calls in self.counted(name))

    def ratio(self, name: str, base: str) -> float:
        """Median over rounds of `name`'s time by `base`'s."""
        return median(calls[name].seconds / calls[base].seconds for calls in self.counted(name, base))

    def counted(self, *names: str) -> list[dict[str, Call]]:
        """The rounds in which these rivals were undisturbed, or all."""
        quiet = [calls for calls in self.rounds if all(calls[name].quiet for name in names)]
        return quiet if len(quiet) >= FEWEST else self.rounds

    def note(self, *names: str) -> str:
        """How many rounds count for these rivals."""
        counted = self.counted(*names)
        quiet = all(calls[name].quiet for calls in counted for name in names)
        return f"{len(counted)} rounds" if quiet else f"{len(counted)} disturbed rounds"


def measure(call: Callable[[], object], waiting: "Waiting") -> Call:
    """The first call in which no thread had to wait, or the last one tried."""
    for _ in range(TRIES):
        waited, start = waiting.seconds(), time.perf_counter()
        call()
        spent = time.perf_counter() - start
        quiet = waiting.seconds() - waited <= WAIT * spent
        if quiet:
            break
    return Call(spent, quiet)


class Waiting:
    """How long the threads of this process have waited for a core; 0 where the system cannot say."""

    def __init__(self) -> None:
        self.files = [os.open(file, os.O_RDONLY) for file in Path("/proc/self/task").glob("*/schedstat")]

    def seconds(self) -> float:
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self.files) / 1e9


def make_pool(num_blocks: int) -> Tensor:
    """A pool of random keys and values that begins with a page, as a mapped file does."""
    shape = num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM
    size = prod(shape)
    memory = torch.empty(size + PAGE // 2, dtype=torch.bfloat16)
    first = -memory.data_ptr() % PAGE // 2
    pool = memory[first : first + size].view(shape)
    pool.copy_(torch.randn(shape))
    return pool


def decode(ops: Ops) -> Case:
    """32 sequences of 256 tokens: against gather + dense attention, and a sum over as many bytes."""
    sequences, context = 32, 256
    blocks = sequences * context // BLOCK_SIZE
    pool = make_pool(blocks)
    tables = torch.randperm(blocks).view(sequences, -1).to(torch.int32)
    long_tables = tables.long()
    query = torch.randn(sequences, QUERY_HEADS, HEAD_DIM).to(torch.bfloat16)
    rows = query.view(sequences, KV_HEADS, GROUP, HEAD_DIM)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    contexts = torch.full((sequences,), context, dtype=torch.int32)
    plain = [torch.randn(sequences * context * KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]  # 2 · 2 = 4 bytes
    pieces = pool.view(-1, BLOCK_SIZE * HEAD_DIM)  # a head of a block; of layer 0, in the final layout:
    caches = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(LAYERS)]
    out = torch.empty_like(query)
    first_pieces = (
        torch.arange(2)[:, None, None, None] * KV_HEADS
        + torch.arange(KV_HEADS)[:, None]
        + long_tables[:, None, :] * (LAYERS * 2 * KV_HEADS)
    ).flatten()

    def paged(layer: int) -> Tensor:
        return ops.paged_attention(query, *caches[layer], tables, starts, contexts, scale=SCALE, out=out)

    def indexed(layer: int) -> Tensor:
        keys, values = (
            cache[long_tables].transpose(1, 2).reshape(sequences, KV_HEADS, context, HEAD_DIM)
            for cache in caches[layer]
        )
        return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def one_by_one(layer: int) -> Tensor:
        out = torch.empty_like(rows)
        for sequence in range(sequences):
            keys, values = (
                cache[long_tables[sequence]].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)
                for cache in caches[layer]
            )
            out[sequence] = scaled_dot_product_attention(rows[sequence][None], keys, values)[0]
        return out.view_as(query)

    def selected(layer: int) -> Tensor:
        gathered = pieces.index_select(0, first_pieces + layer * 2 * KV_HEADS)
        keys, values = gathered.view(2, sequences, KV_HEADS, context, HEAD_DIM)
        return scaled_dot_product_attention(rows, keys, values).reshape(query.shape)

    for rival in (indexed, one_by_one, selected):
        assert torch.allclose(paged(7).float(), rival(7).float(), atol=0.02)
    layers = itertools.cycle(range(LAYERS))
    return Case(
        {
            "paged": lambda: paged(next(layers)),
            "indexed": lambda: indexed(next(layers)),
            "one by one": lambda: one_by_one(next(layers)),
            "selected": lambda: selected(next(layers)),
            "sum": lambda: plain[next(layers)].sum(),
        }
    )


def prefill(ops: Ops) -> Case:
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

    wide_keys, wide_values = keys.repeat_interleave(GROUP, 1), values.repeat_interleave(GROUP, 1)

    def dense_expanded() -> Tensor:
        return scaled_dot_product_attention(rows, wide_keys, wide_values, attn_mask=visible)

    assert torch.allclose(paged().float(), dense()[0].transpose(0, 1).float(), atol=0.02)
    return Case({"paged": paged, "dense": dense, "dense expanded": dense_expanded})


def overhead(ops: Ops) -> Case:
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
    return Case(
        {
            "rms_norm": lambda: ops.rms_norm(row, weight, 1e-5, row),
            "silu_mul": lambda: ops.silu_mul(gate_up),
            "rotary_store_kv": lambda: ops.rotary_store_kv(
                query, key, key, *caches, position, cos_sin, position
            ),
            "paged_attention": lambda: ops.paged_attention(query, *caches, table, starts, one, scale=SCALE),
        }
    )


def main() -> int:
    """Print the ratios; the exit status says whether all marks were reached."""
    ops = load("cpu")
    case = decode(ops)
    of_rivals = {name: case.ratio(name, "paged") for name in ("indexed", "one by one", "selected")}
    of_sum = case.ratio("sum", "paged")
    print(f"threads {torch.get_num_threads()}")
    print(f"decode, 32 × 256 tokens: {case.seconds('paged') * 1e6:.0f} µs ({case.note('paged')})")
    print(f"  times as fast as gather + dense attention (mark: {TIMES}):")
    for name, ratio in of_rivals.items():
        print(f"    {ratio:.1f} {name}, {case.seconds(name) * 1e6:.0f} µs ({case.note(name, 'paged')})")
    note = case.note("sum", "paged")
    print(f"  {of_sum:.2f} of the speed of a threaded sum over as many bytes (mark: 0.5; {note})")
    case = prefill(ops)
    of_dense, name = min((case.ratio(name, "paged"), name) for name in ("dense", "dense expanded"))
    print(f"prefill, 512 on 1,024 tokens: {case.seconds('paged') * 1e3:.2f} ms ({case.note('paged')})")
    note = case.note(name, "paged")
    print(f"  {of_dense:.2f} times as fast as dense attention on contiguous tensors (mark: 1; {note})")
    case = overhead(ops)
    for name in case.rounds[0]:
        print(f"{name} of one token: {case.seconds(name) * 1e6:.1f} µs")
    return 0 if min(of_rivals.values()) >= TIMES and of_sum >= 0.5 and of_dense >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
