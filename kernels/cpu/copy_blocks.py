"""copy_blocks on CPUs (what it does: kernels/reference/copy_blocks.py): one memcpy per block."""

from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy each pair's source block over its destination block."""
    for source, destination in pairs.tolist():
        pool[destination].copy_(pool[source])
