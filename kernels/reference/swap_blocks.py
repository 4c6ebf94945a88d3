"""swap_blocks: whole blocks from one pool to another (say, device memory to host memory).

    destination[d] = source[s]        for each (s, d) of pairs

source, destination  [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; num_blocks may differ
pairs                int64 [n, 2], on the source's device or the host's; destinations are distinct
"""

from torch import Tensor


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy each pair's block of `source` over its block of `destination`."""
    from_blocks, to_blocks = pairs[:, 0].to(source.device), pairs[:, 1].to(destination.device)
    destination[to_blocks] = source[from_blocks].to(destination.device)
