"""The block pool as a tensor: `kv.bin`, shared with the KV manager and the other runners."""

from pathlib import Path

import torch
from torch import Tensor

from kvmanager.protocol import Layout

POOL_FILE = "kv.bin"

LayerCaches = list[tuple[Tensor, Tensor]]
"""Per layer its keys and its values, `[num_blocks, num_kv_heads, block_size, head_dim]` each."""


def pool_shape(layout: Layout, num_blocks: int) -> tuple[int, ...]:
    """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous range."""
    return (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)


def layer_caches(pool: Tensor) -> LayerCaches:
    """The views of a pool that the layers work on; made once, as each costs some microseconds."""
    return [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(pool.shape[1])]


def map_pool(path: str | Path, layout: Layout, num_blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """Map `kv.bin` of the pool directory `path`, shared and writable. Raises ValueError if it is too small.

    On an accelerator the pool is memory of the device, of the same shape; it is this process's own.
    """
    device = torch.device(device)
    shape, dtype = pool_shape(layout, num_blocks), getattr(torch, layout.dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    file = Path(path) / POOL_FILE
    wanted, found = layout.block_bytes * num_blocks, file.stat().st_size
    if found < wanted:
        raise ValueError(
            f"{file} has {found} bytes; {num_blocks} blocks of {layout.block_bytes} bytes need {wanted}"
        )
    mapped = torch.from_file(str(file), shared=True, size=wanted // dtype.itemsize, dtype=dtype)
    return mapped.view(shape)
