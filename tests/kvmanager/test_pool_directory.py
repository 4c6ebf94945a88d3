"""The pool's files: made in full or not at all, bound to a layout and a size, private to their owner."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmanager import memory, pool_directory
from kvmanager.errors import PagekeeperError
from kvmanager.paths import default_pool_directory, lock_path, manager_endpoint, prepare, socket_endpoint
from kvmanager.protocol import Layout
from kvmanager.records import record_bytes
from tests.kvmanager.fake_clients import LAYOUT

SIZE = 10 * LAYOUT.block_bytes


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(prepare(str(tmp_path / "outer" / "pool")))


def test_create_makes_private_files_of_the_right_size(directory: str) -> None:
    assert pool_directory.create(directory, LAYOUT, SIZE + 3) == 10
    root = Path(directory)
    assert (root / "kv.bin").stat().st_size == SIZE
    assert (root / "kv.bin").stat().st_blocks * 512 >= SIZE
    assert (root / "blocks.meta").stat().st_size == 10 * record_bytes(LAYOUT.block_size)
    for name in ("kv.bin", "blocks.meta", "layout.json"):
        assert (root / name).stat().st_mode & 0o777 == 0o600
    for path in (root, root / "locks", root / "sockets"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert pool_directory.read_layout(directory) == (LAYOUT, 10)
    assert pool_directory.why_unusable(directory, SIZE) == ""


def test_blocks_are_mapped_shared(directory: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    one, two = (pool_directory.map_blocks(directory, LAYOUT, 10) for _ in range(2))
    one[5] = 7
    assert (two[5], len(two)) == (7, SIZE)
    with pytest.raises(PagekeeperError, match="announced"):
        pool_directory.map_blocks(directory, LAYOUT, 11)


def test_an_empty_directory_has_no_pool(directory: str) -> None:
    assert "layout.json" in pool_directory.why_unusable(directory, SIZE)
    assert not pool_directory.remove(directory)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "no json",
        '{"format":1,"num_blocks":10,"layout":{}}',
        '{"format":1,"num_blocks":10,"layout":{"model":1}}',
    ],
)
def test_a_damaged_layout_is_no_pool(directory: str, text: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    (Path(directory) / "layout.json").write_text(text)
    assert pool_directory.read_layout(directory) is None
    assert pool_directory.remove(directory)


def test_a_layout_of_wrong_types_or_another_format_is_no_pool(directory: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    path = Path(directory) / "layout.json"
    good = path.read_text()
    path.write_text(good.replace('"block_size":4', '"block_size":"4"'))
    assert pool_directory.read_layout(directory) is None
    path.write_text(good.replace('"format":1', '"format":2'))
    assert pool_directory.read_layout(directory) is None


@pytest.mark.parametrize("field", ["block_size", "num_layers", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("size", [0, -4])
def test_a_layout_without_bytes_is_no_pool(directory: str, field: str, size: int) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    path = Path(directory) / "layout.json"
    path.write_text(re.sub(f'"{field}":[0-9]+', f'"{field}":{size}', path.read_text()))
    assert "layout.json is missing, damaged" in pool_directory.why_unusable(directory, SIZE)
    with pytest.raises(PagekeeperError, match="has no bytes"):
        pool_directory.create(directory, msgspec.structs.replace(LAYOUT, **{field: size}), SIZE)


def test_another_size_is_unusable(directory: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    reason = pool_directory.why_unusable(directory, 2 * SIZE)
    assert "10 blocks" in reason
    assert "asks for 20" in reason


@pytest.mark.parametrize("name", ["kv.bin", "blocks.meta"])
def test_a_cut_or_missing_file_is_unusable(directory: str, name: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    path = Path(directory) / name
    os.truncate(path, path.stat().st_size - 1)
    assert name in pool_directory.why_unusable(directory, SIZE)
    path.unlink()
    assert f"{name} has 0 bytes" in pool_directory.why_unusable(directory, SIZE)


def test_a_pool_of_less_than_one_block_is_refused(directory: str) -> None:
    with pytest.raises(PagekeeperError, match="pool_bytes=5 is less than one block"):
        pool_directory.create(directory, LAYOUT, 5)


def test_more_than_is_free_is_refused_before_any_of_it_is_taken(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: Any) -> None:
        raise AssertionError("nothing may be allocated")

    monkeypatch.setattr(os, "posix_fallocate", taken)
    huge = LAYOUT.block_bytes << 50
    with pytest.raises(PagekeeperError, match="bytes are free; lower pool_bytes"):
        pool_directory.create(directory, LAYOUT, huge)


def test_more_than_the_memory_that_is_left_is_refused(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = SIZE + 10 * record_bytes(LAYOUT.block_size)
    monkeypatch.setattr(memory, "available_for", lambda directory: wanted - 1)
    with pytest.raises(PagekeeperError, match=f"which is memory: {wanted - 1} bytes of it are left; lower"):
        pool_directory.create(directory, LAYOUT, SIZE)
    assert pool_directory.create(directory, LAYOUT, SIZE - 1) == 9


def test_what_is_no_file_in_the_place_of_one_is_said(directory: str) -> None:
    for name in ("layout.json", "kv.bin"):
        (Path(directory) / name).mkdir()
        with pytest.raises(PagekeeperError, match=f"{name} is no file of a pool .* move it away"):
            pool_directory.create(directory, LAYOUT, SIZE)
        if name == "layout.json":
            with pytest.raises(PagekeeperError, match="is no file of a pool"):
                pool_directory.read_layout(directory)
        (Path(directory) / name).rmdir()


def test_a_directory_without_a_name_is_refused() -> None:
    with pytest.raises(PagekeeperError, match="pool_directory is empty"):
        prepare("")


def test_too_little_space_names_the_bytes_and_the_setting(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pool_directory.create(directory, LAYOUT, SIZE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PagekeeperError) as caught:
        pool_directory.create(directory, LAYOUT, SIZE)
    wanted = SIZE + 10 * record_bytes(LAYOUT.block_size)
    for words in (str(wanted), "bytes are free", f"pool_bytes (now {SIZE})"):
        assert words in caught.value.message
    assert sorted(path.name for path in Path(directory).iterdir()) == ["locks", "sockets"]


def test_making_a_large_pool_shows_progress(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_directory, "ALLOCATED_AT_ONCE", LAYOUT.block_bytes)
    shown: list[None] = []
    num_blocks = pool_directory.create(directory, LAYOUT, 5 * LAYOUT.block_bytes, lambda: shown.append(None))
    assert (num_blocks, len(shown)) == (5, 5)
    assert (Path(directory) / "kv.bin").stat().st_size == 5 * LAYOUT.block_bytes


def test_a_mapped_pool_outlives_its_replacement(directory: str) -> None:
    pool_directory.create(directory, LAYOUT, SIZE)
    old = pool_directory.map_blocks(directory, LAYOUT, 10)
    pool_directory.create(directory, Layout("other", "float32", 4, 1, 1, 2), SIZE // 2)
    old[SIZE - 1] = 1
    assert (Path(directory) / "kv.bin").read_bytes() == bytes(SIZE // 2)


def test_a_directory_that_others_may_enter_is_refused(directory: str) -> None:
    Path(directory).chmod(0o750)
    with pytest.raises(PagekeeperError, match=r"mode 750.*chmod 700"):
        prepare(directory)


def test_the_folder_of_all_our_pools_must_be_ours_alone(tmp_path: Path) -> None:
    parent = tmp_path / f"pagekeeper-{os.getuid()}"
    parent.mkdir(mode=0o755)
    with pytest.raises(PagekeeperError, match=r"mode 755.*chmod 700 .*pagekeeper-\d+$"):
        prepare(str(parent / "default"))
    parent.chmod(0o700)
    prepare(str(parent / "default"))


def test_a_directory_of_someone_else_is_refused(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PagekeeperError, match=r"belongs to user .* not to 4242"):
        prepare(directory)


def test_a_directory_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PagekeeperError, match="cannot create the pool directory"):
        prepare(str(tmp_path / "file" / "pool"))


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * 129, "a\0b", "a\nb"])
def test_lock_names_are_plain(name: str) -> None:
    with pytest.raises(PagekeeperError, match="plain file name"):
        lock_path("/pool", name)


def test_endpoints_lie_in_the_directory_and_fit_the_kernel() -> None:
    assert manager_endpoint("/pool") == "ipc:///pool/sockets/manager.sock"
    assert default_pool_directory() == f"/dev/shm/pagekeeper-{os.getuid()}/default"
    with pytest.raises(PagekeeperError, match="shorter pool_directory"):
        socket_endpoint("/" + "x" * 100, "manager")
