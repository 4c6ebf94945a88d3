"""exp and tanh of the CPU kernels against numpy's in double precision."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu.exponential import HIGHEST, LOWEST, exp, tanh
from kernels.cpu.jit import jit


def fill(x: NDArray[np.float32], result: NDArray[np.float32]) -> None:
    for index in range(len(x)):
        result[index] = exp(x[index])


def all_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    result = np.empty_like(x)
    jit(fill, cache=False)(x, result)
    return result


@pytest.mark.parametrize(("low", "high"), [(LOWEST, HIGHEST), (-2.0, 2.0), (-1e-3, 1e-3)])
def test_within_two_units_in_the_last_place(low: float, high: float) -> None:
    x = np.linspace(low, high, 1_000_003).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    units = np.abs(all_of(x) - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() < 2


def test_the_ends() -> None:
    x = np.array([0, -np.inf, LOWEST - 0.1, np.inf, HIGHEST + 1, np.nan], dtype=np.float32)
    got, largest = all_of(x), np.exp(HIGHEST)
    assert got[:3].tolist() == [1, 0, 0]
    assert np.allclose(got[3:5], largest, rtol=1e-6)
    assert np.isnan(got[5])


def fill_tanh(x: NDArray[np.float32], result: NDArray[np.float32]) -> None:
    for index in range(len(x)):
        result[index] = tanh(x[index])


@pytest.mark.parametrize("end", [1e-20, 1e-3, 0.3, 5.0, 200.0])
def test_tanh_is_as_exact_near_zero_as_elsewhere(end: float) -> None:
    x = np.linspace(-end, end, 100_000).astype(np.float32)  # an even number: without 0
    result = np.empty_like(x)
    jit(fill_tanh, cache=False)(x, result)
    expected = np.tanh(x.astype(np.float64))
    assert np.abs(result / expected - 1).max() < 5e-7
