"""copy_blocks on CUDA (see kernels/reference/copy_blocks.py). A program per pair and 16 KiB of a block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # int32 words per program: 16 bytes per thread and load, 8 loads


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy each pair's source block over its destination block."""
    copy_words(pool, pool, pairs)


def copy_words(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks between two pools on one device."""
    if pairs.shape[0] == 0:
        return
    sources = source.view(source.shape[0], -1).view(torch.int32)
    destinations = destination.view(destination.shape[0], -1).view(torch.int32)
    words = sources.shape[1]
    copy_kernel[(pairs.shape[0], triton.cdiv(words, WORDS))](
        sources, destinations, pairs.to(source.device), words, WORDS=WORDS, num_warps=4
    )


@triton.jit
def copy_kernel(source, destination, pairs, words, WORDS: tl.constexpr):
    """Grid (pairs, parts of a block)."""
    pair = tl.program_id(0)
    from_block = tl.load(pairs + 2 * pair)
    to_block = tl.load(pairs + 2 * pair + 1)
    i = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = i < words
    tl.store(
        destination + to_block * words + i, tl.load(source + from_block * words + i, mask=inside), mask=inside
    )
