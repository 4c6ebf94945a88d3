"""rotary and rotary_store_kv on CPUs (what they compute: kernels/reference/rotary.py).

Tokens are shared out over the threads.
"""

from typing import Any, NamedTuple

import torch
from numba import types
from torch import Tensor

from kernels.cpu.jit import (
    GOMP_PARALLEL,
    jit,
    literal_intrinsic,
    literal_value,
    over_rows,
    parallel,
    share_out,
)
from kernels.cpu.memory import (
    FLOAT32,
    INT64,
    KINDS,
    LANES,
    Kind,
    Pointer,
    elements,
    emit_load,
    emit_store,
    size_of,
)
from kernels.cpu.store_kv import copy_head
from kernels.cpu.workspace import WORKSPACE


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate every head of `query` and `key` in place."""
    for heads in (query, key):
        run_rotary(
            GOMP_PARALLEL,
            torch.get_num_threads(),
            WORKSPACE.address,
            KINDS[heads.dtype],
            heads.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.stride(0),
            *heads.stride()[:2],
            *heads.shape,
        )


def rotary_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate `query` in place and store the rotated key and the value; `key` itself stays as it was."""
    run_rotary_store_kv(
        GOMP_PARALLEL,
        torch.get_num_threads(),
        WORKSPACE.address,
        KINDS[query.dtype],
        KINDS[key_cache.dtype],
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.stride(0),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        query.shape[1],
        *key.shape,
        key_cache.shape[2],
    )


class RotaryJob(NamedTuple):
    """The arguments of one in-place rotation; tensors as addresses, strides in elements."""

    kind: Kind
    heads: int
    positions: int
    cos_sin: int
    cos_sin_row: int
    token: int
    head: int
    num_tokens: int
    num_heads: int
    head_dim: int


@jit
def rotate_token(job: RotaryJob, token: int) -> None:
    """All heads of one token."""
    position = elements(INT64, job.positions)[token]
    cos_sin = elements(FLOAT32, job.cos_sin + position * job.cos_sin_row * 4)
    for head in range(job.num_heads):
        place = (token * job.token + head * job.head) * size_of(job.kind)
        heads = elements(job.kind, job.heads + place)
        rotate(heads, heads, cos_sin, job.head_dim // 2)


@jit
def rotate(source: Pointer, destination: Pointer, cos_sin: Pointer, half: int) -> None:
    """One head; source and destination are the same or do not overlap."""
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        rotate_lanes(source, destination, cos_sin, half, i, LANES)
    for i in range(whole, half):
        rotate_lanes(source, destination, cos_sin, half, i, 1)


@literal_intrinsic
def rotate_lanes(
    typing_context: Any, source: Any, destination: Any, cos_sin: Any, half: Any, index: Any, count: Any
) -> Any:
    """`count` (a literal) pairs of a head, all read before any is written: in place, yet in vectors."""
    width = literal_value(count)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_place, destination_place, cos_sin_place, half, index, _ = arguments
        other = builder.add(half, index)
        first = emit_load(builder, source.dtype, builder.gep(source_place, [index]), width)
        second = emit_load(builder, source.dtype, builder.gep(source_place, [other]), width)
        cos = emit_load(builder, types.float32, builder.gep(cos_sin_place, [index]), width)
        sin = emit_load(builder, types.float32, builder.gep(cos_sin_place, [other]), width)
        left = builder.fsub(builder.fmul(first, cos), builder.fmul(second, sin))
        right = builder.fadd(builder.fmul(second, cos), builder.fmul(first, sin))
        emit_store(builder, destination.dtype, builder.gep(destination_place, [index]), left, width)
        emit_store(builder, destination.dtype, builder.gep(destination_place, [other]), right, width)
        return context.get_dummy_value()

    return types.void(source, destination, cos_sin, types.int64, types.int64, count), codegen


rotary_work = over_rows(rotate_token)


@jit
def run_rotary(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the tokens out."""
    job = RotaryJob(*arguments)
    work_size = job.num_tokens * job.num_heads * job.head_dim
    workers, items = share_out(counter, threads, job.num_tokens, work_size)
    parallel(gomp, workers, rotary_work, (job, counter, job.num_tokens, items))


class StoreJob(NamedTuple):
    """The arguments of the fused op; tensors as addresses, strides in elements."""

    kind: Kind
    cache_kind: Kind
    query: int
    key: int
    value: int
    key_cache: int
    value_cache: int
    positions: int
    cos_sin: int
    slot_mapping: int
    cos_sin_row: int
    query_token: int
    query_head: int
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
    num_query_heads: int
    num_tokens: int
    num_heads: int
    head_dim: int
    block_size: int


@jit
def rotate_and_store_token(job: StoreJob, token: int) -> None:
    """The query heads of one token, and its key and value where it has a slot."""
    position, slot = elements(INT64, job.positions)[token], elements(INT64, job.slot_mapping)[token]
    cos_sin = elements(FLOAT32, job.cos_sin + position * job.cos_sin_row * 4)
    for head in range(job.num_query_heads):
        place = (token * job.query_token + head * job.query_head) * size_of(job.kind)
        query = elements(job.kind, job.query + place)
        rotate(query, query, cos_sin, job.head_dim // 2)
    if slot >= 0:
        rotate_and_store(job, token, slot, cos_sin)


@jit
def rotate_and_store(job: StoreJob, token: int, slot: int, cos_sin: Pointer) -> None:
    """Key and value of one token, all heads."""
    size, cache_size = size_of(job.kind), size_of(job.cache_kind)
    block = slot // job.block_size
    offset = slot - block * job.block_size
    for head in range(job.num_heads):
        key = elements(job.kind, job.key + (token * job.key_token + head * job.key_head) * size)
        place = block * job.key_cache_block + head * job.key_cache_head + offset * job.key_cache_slot
        rotate(key, elements(job.cache_kind, job.key_cache + place * cache_size), cos_sin, job.head_dim // 2)
        value = elements(job.kind, job.value + (token * job.value_token + head * job.value_head) * size)
        place = block * job.value_cache_block + head * job.value_cache_head + offset * job.value_cache_slot
        copy_head(value, elements(job.cache_kind, job.value_cache + place * cache_size), job.head_dim)


rotary_store_work = over_rows(rotate_and_store_token)


@jit
def run_rotary_store_kv(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the tokens out."""
    job = StoreJob(*arguments)
    work_size = job.num_tokens * (job.num_query_heads + 2 * job.num_heads) * job.head_dim
    workers, items = share_out(counter, threads, job.num_tokens, work_size)
    parallel(gomp, workers, rotary_store_work, (job, counter, job.num_tokens, items))
