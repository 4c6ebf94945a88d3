"""copy_blocks: whole blocks, all layers, from one place of the pool to another (copy-on-write).

    pool[destination] = pool[source]        for each (source, destination) of pairs

pool   [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
pairs  int64 [n, 2]; destinations are distinct and none is also a source, so that the order does not matter
"""

from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy each pair's source block over its destination block."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]
