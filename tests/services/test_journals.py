"""What both kinds of journal promise, and what each does when its store fails."""

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from kvmanager.errors import PagekeeperError
from services.file_journal import STUCK, FileFollower, FileJournal, FileJournals
from services.journal import Batch, JournalError, JournalLost, Journals, Progress, StreamSpec
from services.redis_journal import INDEX, RedisJournals, key
from tests.services.redis_server import RedisServer

ID = "cmpl-00"
Test = Callable[[Journals, Journals], Awaitable[None]]


def spec(stream_id: str = ID) -> StreamSpec:
    return StreamSpec(stream_id, "/v1/completions", "owner", "", "model", 1.5, b'{"n":2}', ((1, 2), (3,)))


def batch(first: int, *events: bytes, ended: bool = False) -> Batch:
    return Batch(first, events, (Progress(0, 1, (first, first), 5),), ended)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as name:
        yield name


@pytest.fixture(params=["files", "redis"])
def check(request: pytest.FixtureRequest, redis: RedisServer, folder: str) -> Callable[..., None]:
    """Runs a test's coroutine with the journals of two frontends."""
    Redis.from_url(redis.url).flushall()

    def run(test: Test, *, limit: int = 3, max_bytes: int = 1000, ttl: float = 100.0) -> None:
        async def both() -> None:
            made: list[Journals] = []
            for _ in range(2):
                if request.param == "files":
                    made.append(FileJournals(folder, limit, max_bytes, ttl))
                else:
                    made.append(RedisJournals(redis.url, limit, max_bytes, ttl))
            await test(made[0], made[1])
            for journals in made:
                await journals.close()

        asyncio.run(both())

    return run


def test_what_one_frontend_writes_another_reads_while_it_grows(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a", b"b"))
        follower = await there.follow(ID)
        assert follower is not None
        assert follower.state.spec == spec()
        assert follower.state.ring.since(0) == [b"a", b"b"]
        waiting = asyncio.create_task(follower.refresh(20.0))
        await journal.append(batch(3, b"c", ended=True))
        while not follower.state.ended:
            await asyncio.wait_for(waiting, 20)
            waiting = asyncio.create_task(follower.refresh(20.0))
        await waiting
        assert follower.state.ring.since(1) == [b"b", b"c"]
        await journal.close()
        await follower.close()

    check(test)


def test_it_is_taken_over_once_its_owner_has_let_go_and_only_once(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        assert await there.take_over(ID) is None
        await journal.close()
        heir = await there.take_over(ID)
        assert heir is not None
        assert await here.take_over(ID) is None
        await heir.append(batch(2, b"b"))
        assert heir.state.spec == spec()
        assert heir.state.ring.since(0) == [b"a", b"b"]
        assert heir.state.choices[0, 1].token_ids == [1, 1, 2, 2]
        assert heir.state.choices[0, 1].num_cached_tokens == 5
        await heir.append(batch(3, b"c", ended=True))
        await heir.close()
        assert await here.take_over(ID) is None, "it has ended"
        assert await here.take_over("cmpl-ff") is None

    check(test)


def test_only_the_last_events_are_kept_and_all_tokens(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        for number in range(1, 201):
            await journal.append(batch(number, b"x" * 50))
        await journal.close()
        follower = await there.follow(ID)
        assert follower is not None
        assert 150 < follower.state.ring.first < 201
        assert follower.state.ring.next == 201
        await follower.close()
        heir = await there.take_over(ID)
        assert heir is not None
        assert len(heir.state.choices[0, 1].token_ids) == 400
        await heir.append(batch(201, b"y"))
        assert heir.state.ring.since(200) == [b"y"]
        await heir.remove()

    check(test)


def test_a_reader_stays_with_it_over_what_is_dropped(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await there.follow(ID)
        assert follower is not None
        for number in range(2, 150):
            await journal.append(batch(number, b"x" * 50))
        await journal.append(batch(150, b"z", ended=True))
        while not follower.state.ended:
            await follower.refresh(1.0)
        assert follower.state.ring.since(149) == [b"z"]
        await follower.close()
        await journal.close()

    check(test)


def test_one_that_was_removed_is_unknown_and_lost_to_its_readers(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await there.follow(ID)
        assert follower is not None
        await journal.remove()
        with pytest.raises(JournalLost):
            await follower.refresh(0.0)
        assert await there.follow(ID) is None
        await follower.close()

    check(test)


def test_anybody_may_discard_it_and_its_owner_learns_of_it(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        await there.discard(ID)
        await there.discard("cmpl-ff")
        assert await there.follow(ID) is None
        assert await there.take_over(ID) is None
        with pytest.raises(JournalLost):
            await journal.renew()
        await journal.close()

    check(test)


def test_readers_elsewhere_are_seen(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await there.follow(ID)
        assert follower is not None
        await follower.attend()
        assert await journal.renew()
        await follower.close()
        await journal.remove()

    check(test)


def test_at_the_limit_the_oldest_that_nobody_runs_goes(check: Any) -> None:
    async def test(here: Journals, there: Journals) -> None:
        kept = [await here.create(spec(f"cmpl-0{number}")) for number in range(3)]
        with pytest.raises(PagekeeperError, match="3 resumable streams are kept") as refused:
            await there.create(spec("cmpl-0a"))
        assert refused.value.code == "queue_full"
        await kept[1].append(batch(1, b"a", ended=True))
        await kept[1].close()
        kept.append(await there.create(spec("cmpl-0a")))
        assert await here.follow("cmpl-01") is None
        assert await here.follow("cmpl-00") is not None
        for journal in kept:
            await journal.remove()

    check(test)


# --- files --------------------------------------------------------------------------------------------------


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
            patch.setattr("services.file_journal.os.write", full)
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


def test_an_owner_that_is_stopped_does_not_keep_readers_for_ever(folder: str) -> None:
    async def test() -> None:
        journals = FileJournals(folder, 3, 1000, 600.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await journals.follow(ID)
        assert follower is not None
        await follower.refresh(0.0)
        os.utime(Path(folder) / "streams" / ID, (0, time.time() - STUCK - 1))
        with pytest.raises(JournalError, match="has done nothing for 31 s"):
            await follower.refresh(0.0)
        assert isinstance(journal, FileJournal)
        assert await journal.renew()
        await follower.refresh(0.0)
        await follower.close()
        await journal.remove()

    asyncio.run(test())


# --- Redis --------------------------------------------------------------------------------------------------


def test_an_owner_that_was_away_for_too_long_writes_nothing(redis: RedisServer) -> None:
    raw = Redis.from_url(redis.url)
    raw.flushall()

    async def test() -> None:
        here, there = (RedisJournals(redis.url, 3, 1000, 60.0) for _ in range(2))
        journal = await here.create(spec())
        await journal.append(batch(1, b"a"))
        raw.delete(key(ID, "owner"))  # what becomes of a lease that is not renewed
        await journal.renew()
        await journal.append(batch(2, b"b"))
        raw.delete(key(ID, "owner"))
        heir = await there.take_over(ID)
        assert heir is not None
        with pytest.raises(JournalLost):
            await journal.append(batch(3, b"old"))
        await heir.append(batch(3, b"new", ended=True))
        await heir.close()
        with pytest.raises(JournalLost):
            await journal.renew()
        await journal.remove()  # not its own any more
        follower = await here.follow(ID)
        assert follower is not None
        assert follower.state.ring.since(0) == [b"a", b"b", b"new"]
        await here.close()
        await there.close()

    asyncio.run(test())


def test_every_key_expires(redis: RedisServer) -> None:
    raw = Redis.from_url(redis.url)
    raw.flushall()

    async def test() -> None:
        journals = RedisJournals(redis.url, 3, 1000, 60.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await journals.follow(ID)
        assert follower is not None
        await follower.attend()
        times = {
            name.decode().rsplit(":", 1)[1]: raw.ttl(name) for name in raw.scan_iter("pagekeeper:stream:*")
        }
        assert set(times) == {"spec", "owner", "events", "progress", "reader"}
        assert all(0 < seconds <= 60 for seconds in times.values())
        assert raw.zcard(INDEX) == 1
        await journal.remove()
        assert [name for name in raw.scan_iter("pagekeeper:*") if b"reader" not in name] == []
        await journals.close()

    asyncio.run(test())


def test_a_redis_that_hangs_is_an_error_within_a_bound(redis: RedisServer) -> None:
    async def test() -> None:
        journals = RedisJournals(redis.url, 3, 1000, 60.0)
        journal = await journals.create(spec())
        redis.freeze()
        try:
            calls = (journal.append(batch(1, b"a")), journals.create(spec("cmpl-01")), journals.follow(ID))
            ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        finally:
            redis.thaw()
        assert [type(end) for end in ends] == [JournalError, PagekeeperError, PagekeeperError]
        await journal.remove()
        await journals.close()

    Redis.from_url(redis.url).flushall()
    asyncio.run(test())


def test_a_redis_that_goes_away_is_an_error_within_a_bound_and_comes_back() -> None:
    async def test(server: RedisServer) -> None:
        journals = RedisJournals(server.url, 3, 1000, 60.0)
        journal = await journals.create(spec())
        await journal.append(batch(1, b"a"))
        follower = await journals.follow(ID)
        assert follower is not None
        server.kill()
        for failing in (journal.append(batch(2, b"b")), journal.renew(), follower.refresh(1.0)):
            with pytest.raises(JournalError):
                await asyncio.wait_for(failing, 20)
        for refused in (journals.create(spec("cmpl-01")), journals.follow(ID)):
            with pytest.raises(PagekeeperError) as error:
                await asyncio.wait_for(refused, 20)
            assert error.value.code == "journal_unavailable"
        assert await journals.take_over(ID) is None
        server.start()
        with pytest.raises(JournalError, match="not have the journal any more"):
            await journal.append(batch(2, b"b"))
        assert await journals.follow(ID) is None
        await (await journals.create(spec("cmpl-01"))).remove()
        await journals.close()

    with RedisServer() as server:
        asyncio.run(test(server))
