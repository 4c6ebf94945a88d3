"""swap_blocks on CUDA (what it does: kernels/reference/swap_blocks.py).

On one device it is the kernel of copy_blocks. Between device and host it is one asynchronous copy per block
(a block is one contiguous range) on the current stream; the host's pool should be pinned, and `pairs` lie on
the host, so that nothing waits.
"""

from torch import Tensor

from kernels.triton.copy_blocks import copy_words


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy each pair's block of `source` over its block of `destination`."""
    if source.device == destination.device:
        copy_words(source, destination, pairs)
        return
    for from_block, to_block in pairs.tolist():
        destination[to_block].copy_(source[from_block], non_blocking=True)
