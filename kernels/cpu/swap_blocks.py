"""swap_blocks on CPUs (what it does: kernels/reference/swap_blocks.py): one memcpy per block."""

from torch import Tensor


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy each pair's block of `source` over its block of `destination`."""
    for from_block, to_block in pairs.tolist():
        destination[to_block].copy_(source[from_block])
