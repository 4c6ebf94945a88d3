"""store_kv on CPUs (what it computes: kernels/reference/store_kv.py): tokens over threads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.jit import GOMP_PARALLEL, jit, over_rows, parallel, share_out
from kernels.cpu.memory import INT64, KINDS, Kind, Pointer, elements, load, size_of, store
from kernels.cpu.workspace import WORKSPACE


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot; slots that are not named stay as they are."""
    run(
        GOMP_PARALLEL,
        torch.get_num_threads(),
        WORKSPACE.address,
        KINDS[key.dtype],
        KINDS[key_cache.dtype],
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *key.shape,
        key_cache.shape[2],
    )


class Job(NamedTuple):
    """The arguments; tensors as addresses, strides in elements."""

    kind: Kind
    cache_kind: Kind
    key: int
    value: int
    key_cache: int
    value_cache: int
    slot_mapping: int
    key_token: int
    key_head: int
    value_token: int
    value_head: int
    key_cache_block: int
    key_cache_head: int
    key_cache_slot: int
    value_cache_block: int
    value_cache_head: int
    value_cache_slot: int
    num_tokens: int
    num_heads: int
    head_dim: int
    block_size: int


@jit
def store_token(job: Job, token: int) -> None:
    """All heads of one token."""
    slot = elements(INT64, job.slot_mapping)[token]
    if slot < 0:
        return
    size, cache_size = size_of(job.kind), size_of(job.cache_kind)
    block = slot // job.block_size
    offset = slot - block * job.block_size
    for head in range(job.num_heads):
        key = elements(job.kind, job.key + (token * job.key_token + head * job.key_head) * size)
        place = block * job.key_cache_block + head * job.key_cache_head + offset * job.key_cache_slot
        copy_head(key, elements(job.cache_kind, job.key_cache + place * cache_size), job.head_dim)
        value = elements(job.kind, job.value + (token * job.value_token + head * job.value_head) * size)
        place = block * job.value_cache_block + head * job.value_cache_head + offset * job.value_cache_slot
        copy_head(value, elements(job.cache_kind, job.value_cache + place * cache_size), job.head_dim)


@jit
def copy_head(source: Pointer, destination: Pointer, head_dim: int) -> None:
    """One head, converted to the destination's kind."""
    for i in range(head_dim):
        store(destination, i, load(source, i))


work = over_rows(store_token)


@jit
def run(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the tokens out."""
    job = Job(*arguments)
    work_size = 2 * job.num_tokens * job.num_heads * job.head_dim
    workers, items = share_out(counter, threads, job.num_tokens, work_size)
    parallel(gomp, workers, work, (job, counter, job.num_tokens, items))
