"""paged_attention: the reference against torch's dense attention, the CPU kernel against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.backends import Ops, load
from tests.kernels.cases import BOUNDS, Batch, Shape, make_batch, relative_error, same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 256), (1, 257), (1, 1031)]
CHUNKS = [(5, 5), (0, 0), (1, 40), (17, 33), (0, 31), (64, 64), (100, 1100), (16, 16), (3, 515)]


def compare(ops: Ops, reference: Ops, batch: Batch, **options: Any) -> None:
    """Same result within the dtype's bound, every row written, and the pool untouched."""
    options.setdefault("scale", batch.query.shape[2] ** -0.5)
    before = batch.pool.clone()
    expected = reference.paged_attention(*batch.arguments, **options)
    out = torch.full_like(batch.query, torch.nan)
    got = ops.paged_attention(*batch.arguments, **options, out=out)
    assert got is out
    assert relative_error(got, expected) < BOUNDS[batch.query.dtype]
    assert same_bits(batch.pool, before)


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS], ids=["decode", "mixed"])
def test_the_reference_agrees_with_dense_attention(reference: Ops, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths)
    got = reference.paged_attention(*batch.arguments, scale=0.125)
    start = 0
    for index, (length, context) in enumerate(lengths):
        used = batch.block_tables[index, : -(-context // 16)]
        keys, values = (
            cache[used].transpose(0, 1).flatten(1, 2)[None, :, :context]
            for cache in (batch.key_cache, batch.value_cache)
        )
        rows = batch.query[start : start + length].transpose(0, 1)
        visible = torch.ones(length, context, dtype=torch.bool).tril(context - length)
        expected = scaled_dot_product_attention(rows[None], keys, values, attn_mask=visible, enable_gqa=True)[
            0
        ].transpose(0, 1)
        assert relative_error(got[start : start + length], expected) < 2e-6
        start += length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [DECODES, CHUNKS], ids=["decode", "mixed"])
def test_cpu_dtypes(cpu: Ops, reference: Ops, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    compare(cpu, reference, make_batch(lengths, dtype=dtype))


def test_cpu_float32_model_on_a_bfloat16_cache(cpu: Ops, reference: Ops) -> None:
    compare(cpu, reference, make_batch(DECODES + CHUNKS, cache_dtype=torch.bfloat16))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_head_sizes(cpu: Ops, reference: Ops, head_dim: int, dtype: torch.dtype) -> None:
    compare(cpu, reference, make_batch([(1, 300), (40, 70)], Shape(4, 2, head_dim), dtype))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_cpu_block_sizes(cpu: Ops, reference: Ops, block_size: int) -> None:
    lengths = [(1, block_size - 1), (1, block_size), (1, block_size + 1), (block_size + 1, 3 * block_size)]
    compare(cpu, reference, make_batch(lengths, Shape(block_size=block_size)))


@pytest.mark.parametrize(
    ("query_heads", "kv_heads"),
    [(1, 1), (4, 4), (9, 3), (14, 2), (8, 1), (16, 1), (18, 1), (32, 8), (10, 10)],
)
def test_cpu_head_counts(cpu: Ops, reference: Ops, query_heads: int, kv_heads: int) -> None:
    lengths = [(1, 260), (30, 60), (1, 3), (3, 17), (1, 40), (1, 8)]  # enough for turns of several heads
    compare(cpu, reference, make_batch(lengths, Shape(query_heads, kv_heads)))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 70},
        {"soft_cap": 2.0},
        {"sliding_window": 300, "soft_cap": 30.0},
        {"soft_cap": 1e5},
    ],
    ids=str,
)
def test_cpu_options(cpu: Ops, reference: Ops, options: dict[str, Any]) -> None:
    compare(cpu, reference, make_batch(DECODES + CHUNKS), scale=0.3, **options)


@pytest.mark.parametrize("window", [0, 249, 250, 255, 256, 257])
def test_cpu_last_rows_of_a_long_chunk(cpu: Ops, reference: Ops, window: int) -> None:
    """A sequence of more than 96 rows is not split: its last piece has few rows, and many keys."""
    compare(cpu, reference, make_batch([(33, 700), (34, 259), (97, 600)]), sliding_window=window)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 37}], ids=str)
def test_cpu_takes_any_strides(cpu: Ops, reference: Ops, options: dict[str, Any]) -> None:
    """Slots before heads, keys and values in pools of their own, the heads of values the other way round."""
    batch = make_batch(DECODES + CHUNKS, Shape(8, 2, 80))
    keys = batch.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    values = batch.value_cache.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert len({cache.stride() for cache in (batch.key_cache, keys, values)}) == 3
    arguments = batch.query, keys, values, *batch.arguments[3:]
    got, expected = (ops.paged_attention(*arguments, scale=0.2, **options) for ops in (cpu, reference))
    assert relative_error(got, expected) < BOUNDS[torch.float32]


def test_cpu_shared_blocks(cpu: Ops, reference: Ops) -> None:
    batch = make_batch([(1, 200), (1, 170), (33, 150)], shared_blocks=6)
    assert torch.equal(batch.block_tables[0, :6], batch.block_tables[2, :6])
    compare(cpu, reference, batch)


def test_cpu_takes_strided_queries(cpu: Ops, reference: Ops) -> None:
    batch = make_batch([(1, 90), (7, 30)])
    wide = torch.full((8, 15, 64), torch.nan)
    wide[:, :9] = batch.query
    got = cpu.paged_attention(wide[:, :9], *batch.arguments[1:], scale=0.125)
    expected = reference.paged_attention(*batch.arguments, scale=0.125)
    assert relative_error(got, expected) < BOUNDS[torch.float32]


def test_cpu_large_scores_do_not_overflow(cpu: Ops, reference: Ops) -> None:
    """Scores of ±3,000: exp would overflow, and float32 itself leaves errors of 1e-4 in the exponents."""
    batch = make_batch(DECODES + CHUNKS)
    got, expected = (ops.paged_attention(*batch.arguments, scale=100.0) for ops in (cpu, reference))
    assert relative_error(got, expected) < 1e-3


def test_cpu_sequence_alone_and_in_a_batch_has_the_same_bits(cpu: Ops) -> None:
    batch = make_batch(DECODES + CHUNKS)
    together = cpu.paged_attention(*batch.arguments, scale=0.125)
    starts = batch.query_start
    for index in range(len(batch.context_lens)):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        alone = cpu.paged_attention(
            batch.query[rows],
            batch.key_cache,
            batch.value_cache,
            batch.block_tables[index : index + 1],
            starts[index : index + 2] - starts[index],
            batch.context_lens[index : index + 1],
            scale=0.125,
        )
        assert same_bits(alone, together[rows])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, dict[str, Any]]:
    lengths: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 6))):
        context = draw(st.integers(0, 300))
        lengths.append((draw(st.integers(0, min(context, 60))), context))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = Shape(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(st.sampled_from([64, 80, 128])),
        draw(st.sampled_from([8, 16, 32])),
    )
    options = {
        "scale": draw(st.floats(0.01, 0.3)),
        "sliding_window": draw(st.sampled_from([0, 0, 1, 16, 100])),
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 5.0])),
    }
    dtype = draw(st.sampled_from(DTYPES))
    return make_batch(lengths, shape, dtype, seed=draw(st.integers(0, 99)), shared_blocks=2), options


@settings(max_examples=40, deadline=None)
@given(batches())
def test_cpu_random_batches(case: tuple[Batch, dict[str, Any]]) -> None:
    batch, options = case
    compare(load("cpu"), load("reference", checked=True), batch, **options)


def test_rows_of_no_sequence_stay(cpu: Ops, reference: Ops) -> None:
    batch = make_batch([(2, 20), (1, 5)])
    padded = torch.cat([batch.query, torch.full((2, 9, 64), torch.nan)])
    for ops in (cpu, reference):
        out: Tensor = torch.full_like(padded, 7.0)
        ops.paged_attention(padded, *batch.arguments[1:], scale=0.125, out=out)
        assert torch.equal(out[3:], torch.full((2, 9, 64), 7.0))
        assert bool(out[:3].isfinite().all())
