"""The small ops: every backend against the reference, and nothing written outside of what is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backends import Ops, load
from tests.kernels.cases import relative_error, same_bits
from tests.kernels.interpreter import load_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts bfloat16 off where CPUs and GPUs round: up to one unit in the last place.
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}
BACKENDS = ["cpu", "triton"]


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_interpreted() if request.param == "triton" else load("cpu", checked=True)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def enough_rows(ops: Ops, rows: int) -> int:
    """Many rows are for threads to share; Triton's programs are one row each, and slow when interpreted."""
    return min(rows, 7) if ops.name == "triton" else rows


def angles(max_positions: int, head_dim: int) -> Tensor:
    angle = torch.rand(max_positions, head_dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    return torch.cat((angle.cos(), angle.sin()), dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 576), (7, 80), (130, 576)])
def test_rms_norm(ops: Ops, reference: Ops, dtype: torch.dtype, rows: int, hidden: int) -> None:
    rows = enough_rows(ops, rows)
    x, weight = random(rows, 2 * hidden, dtype=dtype)[:, :hidden], random(hidden, dtype=dtype)
    residual = random(rows, hidden, dtype=dtype, seed=1)
    expected_residual = residual.clone()
    assert relative_error(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < BOUNDS[dtype]
    expected = reference.rms_norm(x, weight, 1e-5, expected_residual)
    assert relative_error(ops.rms_norm(x, weight, 1e-5, residual), expected) < BOUNDS[dtype]
    assert relative_error(residual, expected_residual) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 1536), (5, 33), (90, 1536)])
def test_silu_mul(ops: Ops, reference: Ops, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = random(enough_rows(ops, rows), 2 * width, dtype=dtype) * 6
    assert relative_error(ops.silu_mul(gate_up), reference.silu_mul(gate_up)) < BOUNDS[dtype]


def test_silu_mul_far_out(ops: Ops) -> None:
    """Where exp would overflow or vanish: the gate's limits are 0 and the identity."""
    gate = torch.tensor([[-1e4, -100.0, -88.5, 88.5, 100.0, 1e4]])
    got = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.allclose(got, gate.clamp_min(0.0), atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotary_in_views_of_one_projection(
    ops: Ops, reference: Ops, dtype: torch.dtype, head_dim: int
) -> None:
    positions = torch.tensor([0, 99, 2, 2, 98])
    got = random(len(positions), 7, head_dim, dtype=dtype)
    expected, before = got.clone(), got.clone()
    ops.rotary(got[:, :4], got[:, 4:6], positions, angles(100, head_dim))
    reference.rotary(expected[:, :4], expected[:, 4:6], positions, angles(100, head_dim))
    assert relative_error(got, expected) < BOUNDS[dtype]
    assert torch.equal(got[:, 6], before[:, 6])


def caches(dtype: torch.dtype, head_dim: int = 64, block_size: int = 16) -> Tensor:
    return torch.full((6, 3, 2, 3, block_size, head_dim), torch.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True], ids=["store_kv", "rotary_store_kv"])
def test_stores(ops: Ops, reference: Ops, dtype: torch.dtype, cache_dtype: torch.dtype, fused: bool) -> None:
    """Named slots get their token, −1 none; the whole pool, NaN elsewhere, and the key are compared."""
    tokens = random(6, 15, 64, dtype=dtype)
    slots = torch.tensor([3, -1, 95, 16, -1, 31])
    positions = torch.tensor([0, 1, 2, 70, 3, 9])
    results = []
    for backend in (ops, reference):
        pool, mine = caches(cache_dtype), tokens.clone()
        query, key, value = mine[:, :9], mine[:, 9:12], mine[:, 12:]
        key_cache, value_cache = pool[:, 1, 0], pool[:, 1, 1]
        if fused:
            backend.rotary_store_kv(
                query, key, value, key_cache, value_cache, positions, angles(80, 64), slots
            )
        else:
            backend.store_kv(key, value, key_cache, value_cache, slots)
        results.append((pool, mine))
    (pool, mine), (expected_pool, expected_mine) = results
    written = expected_pool.isfinite()
    assert int(written.sum()) == 4 * 2 * 3 * 64
    assert torch.equal(pool.isfinite(), written)
    assert relative_error(pool[written], expected_pool[written]) < BOUNDS[cache_dtype]
    assert relative_error(mine[:, :9], expected_mine[:, :9]) < BOUNDS[dtype]
    assert same_bits(mine[:, 9:], tokens[:, 9:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_and_swaps(ops: Ops, reference: Ops, dtype: torch.dtype) -> None:
    """Bit for bit, NaN included; every block that is no destination stays."""
    pool = random(7, 2, 2, 3, 8, 64, dtype=dtype)
    pool[3, 0, 1] = torch.nan
    pairs = torch.tensor([[3, 0], [3, 6], [5, 1]])
    got, expected = pool.clone(), pool.clone()
    ops.copy_blocks(got, pairs)
    reference.copy_blocks(expected, pairs)
    assert same_bits(got, expected)
    other = random(9, 2, 2, 3, 8, 64, dtype=dtype, seed=1)
    got, expected = other.clone(), other.clone()
    ops.swap_blocks(pool, got, torch.tensor([[3, 8], [0, 0]]))
    reference.swap_blocks(pool, expected, torch.tensor([[3, 8], [0, 0]]))
    assert same_bits(got, expected)
    ops.copy_blocks(got, torch.empty((0, 2), dtype=torch.int64))
    assert same_bits(got, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(range(6 * 16)).map(lambda slots: slots[:40]),
    st.sets(st.integers(0, 39), max_size=10),
    st.sampled_from(DTYPES),
)
def test_cpu_stores_random_slots(slots: list[int], skipped: set[int], dtype: torch.dtype) -> None:
    mapping = torch.tensor([-1 if index in skipped else slot for index, slot in enumerate(slots)])
    key, value = random(40, 3, 64, dtype=dtype), random(40, 3, 64, dtype=dtype, seed=1)
    got, expected = caches(dtype), caches(dtype)
    load("cpu", checked=True).store_kv(key, value, got[:, 2, 0], got[:, 2, 1], mapping)
    load("reference").store_kv(key, value, expected[:, 2, 0], expected[:, 2, 1], mapping)
    assert same_bits(got, expected)
