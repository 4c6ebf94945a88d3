"""The disk tier's file: it survives, and whatever is wrong with it is a miss or a refusal, never data."""

import os
import random
import resource
import stat
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.errors import PagekeeperError
from kvmanager.pool.hashing import Content, block_hash, root_hash, salt_digest
from kvmanager.protocol import Layout
from kvmanager.tier import tier_file
from kvmanager.tier.tier_file import PAGE, TierFile

LAYOUT = Layout("fingerprint", "float32", 4, 1, 1, 2)  # 64 bytes a block
OTHER = Layout("another", "float32", 4, 1, 1, 2)
DISK_BYTES = 3 * PAGE + 4 * PAGE


def content(number: int, salt: str = "", length: int = 4) -> Content:
    tokens = array("I", [number] * length).tobytes()
    parent = root_hash(LAYOUT)
    return Content(block_hash(parent, tokens, salt_digest(salt)), parent, salt_digest(salt), tokens)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(LAYOUT.block_bytes)


def open_tier(path: Path, disk_bytes: int = DISK_BYTES, layout: Layout = LAYOUT) -> TierFile:
    return TierFile(str(path), disk_bytes, layout)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with blocks 0 to 3 in slots 0 to 3."""
    tier = open_tier(tmp_path / "tier")
    for number in range(4):
        tier.write(number, content(number), payload(number))
    tier.close()
    return tmp_path / "tier"


def good_slots(path: Path, layout: Layout = LAYOUT) -> list[int]:
    """Slots that give their very block; every other must be refused, not give something else."""
    tier = open_tier(path, layout=layout)
    good = []
    for number in range(4):
        buffer = bytearray(LAYOUT.block_bytes)
        if tier.read(number, content(number), buffer):
            assert buffer == payload(number)
            good.append(number)
    tier.close()
    return good


def test_blocks_survive_a_restart_in_the_order_of_writing(path: Path) -> None:
    tier = open_tier(path)
    assert tier.note == ""
    assert tier.kept == [(number, content(number)) for number in range(4)]
    tier.write(1, content(9, "salt", 3), payload(9))
    tier.close()
    tier = open_tier(path)
    assert tier.kept == [(n, content(n)) for n in (0, 2, 3)] + [(1, content(9, "salt", 3))]
    buffer = bytearray(LAYOUT.block_bytes)
    assert tier.read(1, content(9, "salt", 3), buffer)
    assert buffer == payload(9)
    assert not tier.read(1, content(1), buffer)
    assert not tier.read(1, content(9, "other", 3), buffer)
    tier.close()


def test_of_equal_contents_the_newest_is_kept(path: Path) -> None:
    tier = open_tier(path)
    tier.write(3, content(0), payload(0))
    tier.close()
    tier = open_tier(path)
    assert tier.kept == [(1, content(1)), (2, content(2)), (3, content(0))]
    tier.close()


def test_the_file_is_private_and_of_the_size_asked_for(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size <= DISK_BYTES
    path.chmod(0o644)
    open_tier(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_costs_its_own_slot_at_most(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "tier"
    tier = open_tier(path)
    for number in range(4):
        tier.write(number, content(number), payload(number))
    tier.close()
    image = bytearray(path.read_bytes())
    headers = PAGE + 4 * (4 + 138 + 16)
    used = [*range(len(tier_file.MAGIC), 72), *range(PAGE, headers)]
    used += [2 * PAGE + slot * PAGE + byte for slot in range(4) for byte in range(LAYOUT.block_bytes)]
    place = data.draw(st.sampled_from([place for place in used if place < len(image)]))
    image[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(image)
    good = good_slots(path)
    assert len(good) >= 3 or (place < PAGE and good == [])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_number_of_bytes_may_be_garbage_or_cut_off(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "tier"
    tier = open_tier(path)
    for number in range(4):
        tier.write(number, content(number), payload(number))
    tier.close()
    image = bytearray(path.read_bytes())
    start = data.draw(st.integers(len(tier_file.MAGIC), len(image) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=3000))
    image[start : start + len(junk)] = junk
    path.write_bytes(image[: data.draw(st.integers(start, len(image)))])
    good_slots(path)


def test_a_file_cut_off_keeps_what_is_whole(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    assert good_slots(path) == [0, 1, 2]
    os.truncate(path, 2 * PAGE)
    assert good_slots(path) == []


def test_a_payload_under_another_slots_header_is_a_miss(path: Path) -> None:
    image = bytearray(path.read_bytes())
    image[2 * PAGE : 2 * PAGE + 64] = payload(1)
    path.write_bytes(image)
    assert good_slots(path) == [1, 2, 3]


def test_a_write_that_was_torn_is_a_miss(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload of a new block is there, its header is still that of the old one."""
    tier = open_tier(path)
    write_all = tier_file.write_all

    def torn(fd: int, data: bytes, offset: int) -> None:
        if offset < 2 * PAGE:
            raise OSError("the process ends here")
        write_all(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(tier_file, "write_all", torn)
        with pytest.raises(OSError, match="ends here"):
            tier.write(2, content(7), payload(7))
    tier.close()
    assert good_slots(path) == [0, 1, 3]


def test_another_layout_or_size_starts_empty_and_gives_nothing(path: Path) -> None:
    tier = open_tier(path, layout=OTHER)
    assert (tier.kept, "layout" in tier.note) == ([], True)
    tier.close()
    assert good_slots(path) == []


def test_slots_carried_over_from_a_file_of_another_layout_are_misses(path: Path) -> None:
    image = path.read_bytes()
    other = path.with_name("other")
    open_tier(other, layout=OTHER).close()
    other.write_bytes(other.read_bytes()[:PAGE].ljust(PAGE, b"\0") + image[PAGE:])
    assert good_slots(other, OTHER) == []


def test_another_version_starts_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_file, "VERSION", 2)
    tier = open_tier(path)
    assert tier.kept == []
    tier.close()


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work")
    with pytest.raises(PagekeeperError, match=r"thesis.txt is a file of something else; remove it or choose"):
        open_tier(path)
    assert path.read_text() == "ten years of work"


def test_what_is_no_file_or_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PagekeeperError, match="is not a file"):
        open_tier(tmp_path / "pipe")
    with pytest.raises(PagekeeperError, match="Is a directory"):
        open_tier(tmp_path)
    with pytest.raises(PagekeeperError, match="No such file"):
        open_tier(tmp_path / "absent" / "tier")
    with pytest.raises(PagekeeperError, match=f"disk_bytes={3 * PAGE} has no room for a block"):
        open_tier(tmp_path / "tier", 3 * PAGE)


def test_a_file_that_another_process_uses_is_refused(path: Path) -> None:
    code = (
        "import sys; from tests.kvmanager.test_tier_file import *; open_tier(Path(sys.argv[1])); "
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(PagekeeperError, match="is in use by another KV manager"):
            open_tier(path)
        other.communicate("", timeout=20)
    open_tier(path).close()


def test_a_full_disk_is_an_error_of_that_write_alone(path: Path) -> None:
    tier = open_tier(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * PAGE, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tier.write(3, content(8), payload(8))
        tier.write(0, content(9), payload(9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tier.close()
    assert good_slots(path) == [1, 2, 3]
