"""The Triton kernels: interpreted on the CPU against the reference; compiled for GPUs, and read back."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from kernels.backends import Ops
from tests.kernels.cases import BOUNDS, Shape, make_batch, relative_error, same_bits
from tests.kernels.interpreter import load_interpreted

# On top of the bounds of cases.py: weights are rounded to the model's dtype before the second product, and
# the interpreter cuts bfloat16 off where a GPU rounds.
TRITON_BOUNDS = {**BOUNDS, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33), (1, 100)]
CHUNKS = [(5, 5), (0, 0), (1, 40), (17, 33), (0, 31), (16, 16), (3, 70)]
# shape, dtype, options: one case per compile-time constant of the kernel
CASES = [
    (Shape(), torch.bfloat16, {}),
    (Shape(), torch.float16, {}),
    (Shape(), torch.float32, {"sliding_window": 20}),
    (Shape(4, 4, 80, 8), torch.float32, {"soft_cap": 3.0}),
    (Shape(), torch.float32, {"soft_cap": 1e5}),
    (Shape(14, 2, 96, 32), torch.float32, {"sliding_window": 1}),
    (Shape(8, 2, 128, 128), torch.float32, {}),
    (Shape(2, 1, 256, 64), torch.float32, {"sliding_window": 33, "soft_cap": 5.0}),
]


@pytest.fixture(scope="module")
def interpreted() -> Ops:
    return load_interpreted()


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS], ids=["decode", "mixed"])
@pytest.mark.parametrize(("shape", "dtype", "options"), CASES, ids=str)
def test_attention(
    interpreted: Ops,
    reference: Ops,
    lengths: list[tuple[int, int]],
    shape: Shape,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    batch = make_batch(lengths, shape, dtype)
    before = batch.pool.clone()
    out = torch.full_like(batch.query, torch.nan)
    interpreted.paged_attention(*batch.arguments, scale=0.2, out=out, **options)
    expected = reference.paged_attention(*batch.arguments, scale=0.2, **options)
    assert relative_error(out, expected) < TRITON_BOUNDS[dtype]
    assert same_bits(batch.pool, before)


def test_a_long_decode_is_split_and_merged(interpreted: Ops, reference: Ops) -> None:
    """1,031 keys of one sequence and 9 of another: some splits of the second one see no key at all."""
    from kernels.triton.paged_attention import count_splits

    batch = make_batch([(1, 1031), (1, 9)], Shape(3, 1))
    assert count_splits(2, 67 * 16 // 64, 2) > 1
    got = interpreted.paged_attention(*batch.arguments, scale=0.125)
    assert relative_error(got, reference.paged_attention(*batch.arguments, scale=0.125)) < 5e-6


def test_gpus_that_are_not_in_the_table_take_the_nearest_kind() -> None:
    """11 as data centre Blackwell (10); 12 is consumer Blackwell, which is shaped as Ampere (8); 7 too."""
    from kernels.triton.configs import config_for

    for major, known in ((7, 8), (9, 9), (11, 10), (12, 8), (13, 8)):
        assert config_for(major, "prefill", 256) is config_for(known, "prefill", 256)


COMPILED_ATTENTION = 10  # launches of the attention kernel per GPU


def test_compiled_kernels_fit_the_gpus_without_spills() -> None:
    """sm_80, sm_90, sm_100: no stack, registers and shared memory fit, attention loads 16 bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    shared_limit = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
    for capability, limit in shared_limit.items():
        mine = [kernel for kernel in kernels if kernel["capability"] == capability]
        attention = [kernel for kernel in mine if kernel["name"].startswith("attention")]
        assert len(attention) == COMPILED_ATTENTION
        assert [kernel["name"] for kernel in mine if kernel["stack"] > 0] == []
        assert [kernel["name"] for kernel in mine if not 0 < kernel["registers"] <= 255] == []
        assert [kernel["name"] for kernel in mine if kernel["shared"] > limit] == []
        assert [kernel["name"] for kernel in attention if not kernel["wide_loads"]] == []
