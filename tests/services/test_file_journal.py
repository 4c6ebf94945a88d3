"""Journals as files: what is torn, flipped, full or stuck."""

import asyncio
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvmanager.errors import PagekeeperError
from services.streams.file_journal import STILL, STUCK, FileFollower, FileJournal, FileJournals
from services.streams.journal import Journal, JournalError, JournalLost
from services.supervisor.lock_files import FileLock
from tests.services.test_journals import ID, batch, spec


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as name:
        yield name


def files(folder: str) -> list[str]:
    return sorted(os.listdir(Path(folder) / "streams"))


def test_files_are_private_and_go_when_their_time_is_over(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, ttl=60.0)
        for name in ("cmpl-00", "cmpl-01", "cmpl-02"):
            journal = await journals.create(spec(name))
            await journal.append(batch(1, b"a"))
            if name != "cmpl-02":
                await journal.close()
        streams = Path(folder) / "streams"
        assert streams.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in streams.iterdir()} == {0o600}
        (streams / "cmpl-0e.new").touch()
        (streams / "cmpl-0f.lock").touch()
        for name in ("cmpl-01", "cmpl-02", "cmpl-0e.new", "cmpl-0f.lock"):
            os.utime(streams / name, (0, time.time() - 61))
        assert await journals.follow("cmpl-01") is None, "expired, though it is still there"
        await journals.sweep()
        assert files(folder) == ["cmpl-00", "cmpl-02", "cmpl-02.lock"], "what has an owner stays"
        await journal.remove()

    asyncio.run(test())


def test_what_is_no_journal_is_left_alone_and_hinders_no_other(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, ttl=60.0)
        streams = Path(folder) / "streams"
        (streams / "cmpl-00").mkdir()
        for name in ("cmpl-01", "essay.txt"):
            (streams / name).touch()
        for path in streams.iterdir():
            os.utime(path, (0, time.time() - 61))
        await journals.sweep()
        assert files(folder) == ["cmpl-00", "essay.txt"]
        os.utime(streams / "cmpl-00")
        handles = len(os.listdir("/proc/self/fd"))
        with pytest.raises(PagekeeperError, match="Is a directory"):
            await journals.follow("cmpl-00")
        assert len(os.listdir("/proc/self/fd")) == handles, "none is left open"

    asyncio.run(test())


def test_an_owner_whose_lock_file_was_removed_gives_way_to_the_next(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 60.0)
        owner = await journals.create(spec())
        await owner.append(batch(1, b"a"))
        (Path(folder) / "streams" / f"{ID}.lock").unlink()
        heir = await journals.take_over(ID)
        assert heir is not None
        await heir.append(batch(2, b"b"))
        follower = await journals.follow(ID)
        assert follower is not None
        with pytest.raises(JournalLost, match="another owns it"):
            await owner.append(batch(2, b"B"))  # it does not know yet
        with pytest.raises(JournalLost, match="another owns it"):
            await owner.renew()
        await follower.refresh(0.0)
        assert follower.state.ring.since(0) == [b"a", b"b"]
        await owner.close()
        await heir.renew()
        assert files(folder) == [ID, f"{ID}.lock"], "the lock is that of the heir"
        await follower.close()
        await heir.remove()

    asyncio.run(test())


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_what_a_killed_frontend_did_not_finish_writing_is_not_there(folder: str, cut: int) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 60.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        await journal.append(batch(2, b"bbbbbbbbbbbbbbbbbbbb"))
        await journal.close()
        path = Path(folder) / "streams" / ID
        os.truncate(path, path.stat().st_size - cut)
        follower = await journals.follow(ID)
        assert follower is not None
        assert follower.state.ring.next == 2
        heir = await journals.take_over(ID)
        assert heir is not None
        await heir.append(batch(2, b"c"))
        await follower.refresh(0.0)
        assert follower.state.ring.since(0) == [b"a", b"c"]
        await heir.remove()
        await follower.close()

    asyncio.run(test())


def test_a_flipped_bit_ends_what_can_be_read(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 60.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        await journal.append(batch(2, b"bbbb"))
        path = Path(folder) / "streams" / ID
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        follower = FileFollower(path, 1000)
        assert follower.state.ring.since(0) == [b"a"]
        path.write_bytes(b"\0" * 64)
        with pytest.raises(PagekeeperError, match="no readable beginning"):
            await journals.follow(ID)
        await journal.remove()
        await follower.close()

    asyncio.run(test())


def test_no_space_is_an_error_that_leaves_the_journal_readable(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 60.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        with monkeypatch.context() as patch:
            patch.setattr("services.streams.file_journal.os.write", full)
            with pytest.raises(JournalError, match="No space left"):
                await journal.append(batch(2, b"b"))
            with pytest.raises(PagekeeperError, match="No space left") as refused:
                await journals.create(spec("cmpl-01"))
        assert refused.value.code == "journal_unavailable"
        assert files(folder) == [ID, f"{ID}.lock"]
        await journal.append(batch(2, b"b"))
        assert journal.state.ring.since(0) == [b"a", b"b"]
        await journal.remove()
        assert files(folder) == []

    asyncio.run(test())


def make_silent(folder: str, seconds: float) -> None:
    os.utime(Path(folder) / "streams" / ID, (0, time.time() - seconds))


async def one_that_stands_still(folder: str) -> Journal:
    """It owns a journal with one event, and has given no sign for so long that it may be taken away."""
    owner = await FileJournals(folder, 3, 1000, 600.0).create(spec())
    await owner.append(batch(1, b"a"))
    make_silent(folder, STILL + 1)
    return owner


def test_what_an_owner_that_stood_still_writes_reaches_nobody(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        owner, there = await one_that_stands_still(folder), FileJournals(folder, 3, 1000, 600.0)
        replace = os.replace

        def just_before(*paths: Path) -> None:
            """It goes on while it loses the journal."""
            monkeypatch.setattr(os, "replace", replace)
            with pytest.raises(StopIteration):
                owner.append(batch(2, b"b")).send(None)
            replace(*paths)

        monkeypatch.setattr(os, "replace", just_before)
        heir = await there.take_over(ID)
        assert heir is not None
        with pytest.raises(JournalLost):
            await owner.append(batch(3, b"C"))
        await heir.append(batch(3, b"c"))
        await owner.close()
        assert await heir.renew()
        follower = await there.follow(ID)
        assert follower is not None
        assert follower.state.ring.since(0) == [b"a", b"b", b"c"]
        await follower.close()
        await heir.remove()
        assert files(folder) == []

    asyncio.run(test())


LONG = b"x" * 4000  # after so much the file is written anew


@pytest.mark.parametrize(
    "act", [lambda owner: owner.append(batch(2, LONG)), lambda owner: owner.remove()], ids=["write", "remove"]
)
def test_an_owner_that_is_stopped_before_it_replaces_its_file_leaves_that_of_the_heir(
    folder: str, monkeypatch: pytest.MonkeyPatch, act: Callable[[Journal], Awaitable[None]]
) -> None:
    async def test() -> None:
        owner, there = await one_that_stands_still(folder), FileJournals(folder, 3, 1000, 600.0)
        flock, heirs = fcntl.flock, []

        def just_before(fd: int, operation: int) -> None:
            """It has seen that the journal is its own, and goes on when it was taken away."""
            monkeypatch.setattr(fcntl, "flock", flock)
            make_silent(folder, STILL + 1)  # since what it has written just now
            with pytest.raises(StopIteration) as taken:
                there.take_over(ID).send(None)
            heirs.append(taken.value.value)
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", just_before)
        await act(owner)
        (heir,) = heirs
        await heir.append(batch(heir.state.ring.next, b"heir"))
        follower = await there.follow(ID)
        assert follower is not None
        assert follower.state.ring.since(follower.state.ring.next - 2) == [b"heir"]
        await follower.close()
        await owner.close()
        await heir.remove()
        assert files(folder) == []

    asyncio.run(test())


def test_while_an_owner_replaces_its_file_nobody_takes_the_journal_away(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        owner, there = await one_that_stands_still(folder), FileJournals(folder, 3, 1000, 600.0)
        replace, heirs = os.replace, []

        def just_before(*paths: Path) -> None:
            make_silent(folder, STILL + 1)
            with pytest.raises(StopIteration) as taken:
                there.take_over(ID).send(None)
            heirs.append(taken.value.value)
            replace(*paths)

        monkeypatch.setattr(os, "replace", just_before)
        await owner.append(batch(2, LONG))
        monkeypatch.setattr(os, "replace", replace)
        assert heirs == [None]
        await owner.append(batch(3, b"c"))
        make_silent(folder, STILL + 1)
        heir = await there.take_over(ID)
        assert heir is not None
        assert heir.state.ring.since(2) == [b"c"]
        await owner.close()
        await heir.remove()
        assert files(folder) == []

    asyncio.run(test())


def test_an_owner_that_is_stopped_does_not_keep_readers_for_ever(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 600.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await journals.follow(ID)
        assert follower is not None
        await follower.refresh(0.0)
        make_silent(folder, STUCK + 1)
        with pytest.raises(JournalError, match="has done nothing for 31 s"):
            await follower.refresh(0.0)
        assert isinstance(journal, FileJournal)
        assert await journal.renew()
        await follower.refresh(0.0)
        await follower.close()
        await journal.remove()

    asyncio.run(test())


def test_of_two_that_take_a_journal_away_at_once_one_has_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        owner = await one_that_stands_still(folder)
        there, elsewhere = (FileJournals(folder, 3, 1000, 600.0) for _ in range(2))
        take, others = FileLock.take, []

        def at_once(path: Path) -> FileLock | None:
            """Another one is faster, between the look at the lock and taking it away."""
            monkeypatch.setattr(FileLock, "take", take)
            found = take(path)
            with pytest.raises(StopIteration) as taken:
                elsewhere.take_over(ID).send(None)
            others.append(taken.value.value)
            return found

        monkeypatch.setattr(FileLock, "take", at_once)
        heirs = [await there.take_over(ID), *others]
        assert [heir is None for heir in heirs] == [False, True]
        (heir,) = (heir for heir in heirs if heir is not None)
        await heir.append(batch(2, b"b"))
        assert await heir.renew()
        await owner.close()
        await heir.remove()
        assert files(folder) == []

    asyncio.run(test())


def test_what_a_replaced_journal_gets_is_not_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        owner, journals = await one_that_stands_still(folder), FileJournals(folder, 3, 1000, 600.0)
        follower = await journals.follow(ID)
        assert follower is not None
        heirs, pread = [], os.pread

        def just_before(fd: int, length: int, at: int) -> bytes:
            """It changes hands while it is read, and the former owner goes on."""
            monkeypatch.setattr(os, "pread", pread)
            with pytest.raises(StopIteration) as taken:
                journals.take_over(ID).send(None)
            heirs.append(taken.value.value)
            with pytest.raises(JournalLost):
                owner.append(batch(2, b"B")).send(None)
            return pread(fd, 1 << 20, at)

        monkeypatch.setattr(os, "pread", just_before)
        await follower.refresh(0.0)
        assert follower.state.ring.since(0) == [b"a"]
        await heirs[0].append(batch(2, b"b"))
        await follower.refresh(0.0)
        assert follower.state.ring.since(0) == [b"a", b"b"]
        await follower.close()
        await owner.close()
        await heirs[0].remove()

    asyncio.run(test())
