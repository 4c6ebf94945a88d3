"""The disk tier's thread: real copies between a pool's data and a file, failures that end one copy alone."""

import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmanager.tier.disk_tier import DiskTier, Finished
from kvmanager.tier.tier_file import PAGE
from kvmanager.tier.tiers import Copy
from tests.kvmanager.test_tier_file import DISK_BYTES, LAYOUT, content, payload

SIZE = LAYOUT.block_bytes


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """The data of a pool of six blocks."""
    (tmp_path / "kv.bin").write_bytes(b"".join(payload(number) for number in range(6)))
    return tmp_path / "kv.bin"


@pytest.fixture
def tier(pool: Path) -> Iterator[DiskTier]:
    tier = DiskTier(str(pool.with_name("tier")), DISK_BYTES, LAYOUT, pool)
    yield tier
    tier.close()


def block(pool: Path, number: int) -> bytes:
    return pool.read_bytes()[number * SIZE : (number + 1) * SIZE]


def wait(tier: DiskTier, count: int) -> list[Finished]:
    """The next `count` copies that end."""
    ended: list[Finished] = []
    while len(ended) < count:
        assert select.select([tier.fileno], [], [], 20.0)[0], f"{len(ended)} of {count} copies ended"
        ended += tier.take()
    return ended


def test_a_block_goes_to_the_file_and_comes_back_after_a_restart(pool: Path, tier: DiskTier) -> None:
    tier.demote(Copy(2, 1, content(2)))
    (ended,) = wait(tier, 1)
    assert (ended.copy, ended.promotion, ended.good) == (Copy(2, 1, content(2)), False, True)
    tier.close()
    again = DiskTier(str(pool.with_name("tier")), DISK_BYTES, LAYOUT, pool)
    assert again.kept == [(1, content(2))]
    again.promote(Copy(5, 1, content(2)))
    (ended,) = wait(again, 1)
    assert ended.good
    assert ended.seconds > 0
    assert block(pool, 5) == payload(2)
    assert [block(pool, number) for number in range(5)] == [payload(number) for number in range(5)]
    again.close()


def test_damaged_content_fails_and_touches_no_block(
    pool: Path, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.demote(Copy(0, 0, content(0)))
    wait(tier, 1)
    with open(pool.with_name("tier"), "r+b") as file:
        file.seek(2 * PAGE)
        file.write(b"?")
    with caplog.at_level(logging.WARNING):
        tier.promote(Copy(5, 0, content(0)))
        (ended,) = wait(tier, 1)
    assert not ended.good
    assert block(pool, 5) == payload(5)
    assert "event=tier_promotion_failed reason='slot 0 does not hold what it should'" in caplog.text


def test_an_io_error_fails_that_copy_and_is_logged_once_until_one_goes_well(
    tier: DiskTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            for number in range(3):
                tier.demote(Copy(number, number, content(number)))
            assert [ended.good for ended in wait(tier, 3)] == [False] * 3
        tier.demote(Copy(0, 0, content(0)))
        assert [ended.good for ended in wait(tier, 1)] == [True]
    assert caplog.text.count("No space left on device") == 1


def test_a_pool_that_is_too_short_is_an_error_of_the_copy(tier: DiskTier) -> None:
    tier.demote(Copy(6, 0, content(6)))
    assert [ended.good for ended in wait(tier, 1)] == [False]


def test_promotions_go_first_and_the_queue_is_bounded(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered = threading.Event(), threading.Event()
    tier = DiskTier(str(pool.with_name("tier")), DISK_BYTES, LAYOUT, pool, max_copies=3)
    tier.demote(Copy(0, 0, content(0)))
    wait(tier, 1)
    write = tier._write

    def held(copy: Copy) -> bool:
        entered.set()
        assert gate.wait(20.0)
        return write(copy)

    monkeypatch.setattr(tier, "_write", held)
    tier.demote(Copy(1, 1, content(1)))
    assert entered.wait(20.0)
    waiting = [Copy(2, 2, content(2)), Copy(3, 3, content(3)), Copy(5, 0, content(0))]
    tier.demote(waiting[0])
    tier.demote(waiting[1])
    tier.promote(waiting[2])
    tier.promote(Copy(4, 0, content(0)))
    (refused,) = tier.take()
    assert (refused.copy.block, refused.good) == (4, False)
    gate.set()
    assert [ended.copy.block for ended in wait(tier, 4)] == [1, 5, 2, 3]
    tier.close()


def test_closing_ends_the_thread_and_drops_what_waits(pool: Path, tier: DiskTier) -> None:
    tier.close()
    assert not tier._thread.is_alive()
    assert block(pool, 0) == payload(0)
    again = DiskTier(str(pool.with_name("tier")), DISK_BYTES, LAYOUT, pool)
    assert again.kept == []
    again.close()


def test_what_is_erased_is_not_found_after_a_restart(pool: Path, tier: DiskTier) -> None:
    """In the order in which it was said; what waits at the end is erased all the same."""
    for slot in (0, 1, 2):
        tier.demote(Copy(slot, slot, content(slot)))
    tier.erase(0)
    wait(tier, 3)
    tier.erase(2)
    tier.close()
    again = DiskTier(str(pool.with_name("tier")), DISK_BYTES, LAYOUT, pool)
    assert again.kept == [(1, content(1))]
    again.close()
