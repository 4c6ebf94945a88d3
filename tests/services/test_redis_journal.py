"""Journals in Redis: who may write, what expires, and a Redis that goes away or hangs."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from redis import Redis

from kvmanager.errors import PagekeeperError
from services.streams.journal import Follower, Journal, JournalError, JournalLost
from services.streams.redis_journal import INDEX, RedisJournals, key
from tests.services.redis_server import RedisServer
from tests.services.test_journals import ID, batch, spec


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def followed(journals: RedisJournals) -> tuple[Journal, Follower]:
    """A journal with one event, and one that follows it."""
    journal = await journals.create(spec())
    await journal.append(batch(1, b"a"))
    follower = await journals.follow(ID)
    assert follower is not None
    return journal, follower


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
        journal, follower = await followed(journals)
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


@pytest.mark.parametrize(
    "replace",
    [
        lambda raw, name: raw.xadd(name, {"field": "of another program"}, "7-0"),
        lambda raw, name: raw.xadd(name, {"b": "no batch"}, "7-0"),
        lambda raw, name: raw.xadd(name, {"b": msgspec.msgpack.encode(batch(1, b"other"))}, "7-0"),
        lambda raw, name: raw.delete(name) and raw.set(name, "text"),
    ],
)
def test_keys_that_something_else_wrote_to_are_said_to_be(redis: RedisServer, replace: Any) -> None:
    raw = Redis.from_url(redis.url)
    raw.flushall()

    async def test() -> None:
        journals = RedisJournals(redis.url, 3, 1000, 60.0)
        _, follower = await followed(journals)
        replace(raw, key(ID, "events"))
        with pytest.raises(JournalError, match="something else has written to its keys"):
            await follower.refresh(1.0)
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
        journal, follower = await followed(journals)
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
