"""The pool's mapping: shared, of the manager's layout, and never larger than the file."""

from pathlib import Path

import pytest
import torch

from gpu_runner.kv_cache import map_pool
from kvmanager.protocol import Layout

LAYOUT = Layout("m", "bfloat16", 8, 2, 3, 64)


def test_two_mappings_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "kv.bin").write_bytes(bytes(LAYOUT.block_bytes * 5))
    one, two = map_pool(tmp_path, LAYOUT, 5), map_pool(str(tmp_path), LAYOUT, 5)
    assert one.shape == (5, 2, 2, 3, 8, 64)
    one[3, 1, 0, 2] = 2.5
    assert torch.equal(one, two)


def test_a_block_is_one_range_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "kv.bin").write_bytes(bytes(LAYOUT.block_bytes * 3))
    map_pool(tmp_path, LAYOUT, 3)[1] = 1.0
    data = (tmp_path / "kv.bin").read_bytes()
    size = LAYOUT.block_bytes
    assert data[:size] == bytes(size) == data[2 * size :]
    assert data[size : 2 * size] == b"\x80\x3f" * (size // 2)


def test_a_short_file_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "kv.bin").write_bytes(bytes(LAYOUT.block_bytes * 3))
    with pytest.raises(ValueError, match=rf"has {3 * LAYOUT.block_bytes} bytes; 4 blocks .* need"):
        map_pool(tmp_path, LAYOUT, 4)
    assert (tmp_path / "kv.bin").stat().st_size == 3 * LAYOUT.block_bytes
