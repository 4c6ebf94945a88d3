"""What both kinds of journal promise, and what each does when its store fails."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from kvmanager.errors import PagekeeperError
from services.streams.file_journal import FileJournals
from services.streams.journal import Batch, JournalLost, Journals, Progress, StreamSpec
from services.streams.redis_journal import RedisJournals
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
