"""Inputs for kernel tests: paged batches whose every unused place is NaN, and bounds for results."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Relative norm ‖got − expected‖ / ‖expected‖. Both sides accumulate in float32 and round once to the output's
# dtype; they differ in the order of sums, which that rounding hides but for values near a tie. float32: about
# 40 units in the last place, for sums of a thousand terms. Others: half a unit in the last place, the most
# that rounding to the other neighbour could make. A mistake in the mathematics is orders of magnitude above.
BOUNDS = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ in float64; NaN anywhere makes it NaN."""
    wanted = expected.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Shape:
    """Heads, head size and block size of a model's cache."""

    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16


@dataclass(frozen=True)
class Batch:
    """Arguments of paged_attention, with the pool they lie in."""

    pool: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_start,
            self.context_lens,
        )


def make_batch(
    lengths: list[tuple[int, int]],
    shape: Shape = Shape(),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
    shared_blocks: int = 0,
) -> Batch:
    """A mixed batch of (query length, context length) over permuted blocks of the middle layer of three.

    Slots that hold no token are NaN, table entries past the context are out of range, and the first
    `shared_blocks` blocks of all sequences (as far as they have so many full ones) are the same.
    """
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    counts = [-(-context // size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    pool_shape = (num_blocks, 3, 2, shape.kv_heads, size, shape.head_dim)
    pool = torch.full(pool_shape, torch.nan, dtype=cache_dtype or dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    for index, (_, context) in enumerate(lengths):
        for logical in range(counts[index]):
            shared = (
                index > 0 and logical < shared_blocks and (logical + 1) * size <= min(context, lengths[0][1])
            )
            block = int(tables[0, logical]) if shared else free.pop()
            tables[index, logical] = block
            used = min(size, context - logical * size)
            filling = torch.randn((2, shape.kv_heads, used, shape.head_dim), generator=generator)
            if not shared:
                pool[block, 1, :, :, :used] = filling.to(pool.dtype)
    num_tokens = sum(length for length, _ in lengths)
    query = torch.randn((num_tokens, shape.query_heads, shape.head_dim), generator=generator).to(dtype)
    starts = torch.tensor([0, *(length for length, _ in lengths)]).cumsum(0).to(torch.int32)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return Batch(pool, query, pool[:, 1, 0], pool[:, 1, 1], tables, starts, contexts)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
