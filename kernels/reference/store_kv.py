"""store_kv: scatter a step's new keys and values into the paged cache.

    key_cache[slot // block_size, head, slot % block_size] = key[token, head]    where slot ≥ 0

key, value    [num_tokens, num_kv_heads, head_dim]
*_cache       [num_blocks, num_kv_heads, block_size, head_dim]: strided views of one layer of the pool
slot_mapping  int64 [num_tokens]; slot = block_id · block_size + offset; −1 skips the token
"""

from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot; slots that are not named stay as they are."""
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[kept].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[kept].to(value_cache.dtype)
