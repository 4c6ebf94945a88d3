"""Journals in Redis, for frontends on several hosts. Any version with streams (5.0); one server, no cluster.

Keys begin with `pagekeeper:stream:<id>:`. `spec` is a string; `events` a stream of batches, each with its
last event's number as its id, cut to those that are kept (MAXLEN); `progress` a list that is never cut;
`owner` the lease of the frontend that runs it (SET NX PX, renewed every second); `reader` is there while a
frontend elsewhere reads. Every key expires. What the owner changes it changes by a script that looks at the
lease first, so that an owner that was away for too long writes nothing. `pagekeeper:streams` has all ids,
by the time of their end.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvmanager.settings import SettingError
from services.streams.journal import (
    Batch,
    Journal,
    JournalError,
    JournalLost,
    Progress,
    StreamSpec,
    StreamState,
    full,
    unavailable,
)

LEASE: Final = 3.0  # seconds; renewed every second
PREFIX: Final = "pagekeeper:stream:"
INDEX: Final = "pagekeeper:streams"
BLOCK: Final = 0.25  # seconds, the longest XREAD
CONNECTIONS: Final = 64
READERS: Final = 1024  # of streams that run on other frontends
REPLACED: Final = "something else has written to its keys in Redis"
ANSWER_WITHIN: Final = 2.0  # seconds; Redis counts as away after that

_encode = msgspec.msgpack.Encoder().encode
_decode_spec = msgspec.msgpack.Decoder(StreamSpec).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_progress = msgspec.msgpack.Decoder(tuple[Progress, ...]).decode

# KEYS: spec, owner, events, progress, reader, index. ARGV: token, lease in ms, seconds to live, Unix time,
# stream id, then the script's own.
_CREATE: Final = """
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', ARGV[4])
if redis.call('ZCARD', KEYS[6]) >= tonumber(ARGV[7]) then
  local room = false
  for _, id in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1)) do
    local old = ARGV[8] .. id .. ':'
    if redis.call('EXISTS', old .. 'owner') == 0 then
      redis.call('DEL', old .. 'spec', old .. 'events', old .. 'progress', old .. 'reader')
      redis.call('ZREM', KEYS[6], id)
      room = true
      break
    end
  end
  if not room then return 0 end
end
redis.call('ZADD', KEYS[6], ARGV[4] + ARGV[3], ARGV[5])
redis.call('SET', KEYS[1], ARGV[6], 'EX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
"""
# Own: ids of the last entry that the owner knows, and of the one to add ('' for none), batch, progress,
# length. An owner whose lease ran out goes on if nobody else wrote meanwhile. -1: somebody else's, -2:
# gone.
_APPEND: Final = """
local owner = redis.call('GET', KEYS[2])
if owner and owner ~= ARGV[1] then return -1 end
if redis.call('EXISTS', KEYS[1]) == 0 then return -2 end
local top = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
local at = top[1] and top[1][1] or '0-0'
if at ~= ARGV[6] and at ~= ARGV[7] then return -1 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if ARGV[7] ~= '' and at ~= ARGV[7] then
  redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[10], ARGV[7], 'b', ARGV[8])
  if ARGV[9] ~= '' then redis.call('RPUSH', KEYS[4], ARGV[9]) end
end
for i = 1, 4 do
  if i ~= 2 then redis.call('EXPIRE', KEYS[i], ARGV[3]) end
end
redis.call('ZADD', KEYS[6], ARGV[4] + ARGV[3], ARGV[5])
return 1 + redis.call('EXISTS', KEYS[5])
"""
_CLAIM: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('GET', KEYS[2]) == ARGV[1] then return 1 end
if redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2], 'NX') then return 1 end
return 0
"""
# Own: whether the journal goes too.
_RELEASE: Final = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
if ARGV[6] == '1' then
  redis.call('DEL', KEYS[1], KEYS[3], KEYS[4], KEYS[5])
  redis.call('ZREM', KEYS[6], ARGV[5])
end
return 1
"""
# An owner finds another one in its place.
_DISCARD: Final = """
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('SET', KEYS[2], 'nobody', 'EX', ARGV[3]) end
redis.call('DEL', KEYS[1], KEYS[3], KEYS[4], KEYS[5])
redis.call('ZREM', KEYS[6], ARGV[5])
return 1
"""


class _Store:
    """The connection, and the scripts with their keys. Errors are JournalErrors; every wait has its bound."""

    def __init__(self, url: str, ttl: float) -> None:
        self.ttl = max(1, round(ttl))
        self.redis = _connect(url, CONNECTIONS)
        self.readers = _connect(url, READERS)  # apart: each holds its connection while it waits
        texts = {
            "create": _CREATE,
            "append": _APPEND,
            "claim": _CLAIM,
            "release": _RELEASE,
            "discard": _DISCARD,
        }
        self._scripts = {name: self.redis.register_script(text) for name, text in texts.items()}

    async def close(self) -> None:
        await self.redis.aclose()
        await self.readers.aclose()

    async def run(self, script: str, stream_id: str, token: str, *own: Any) -> int:
        names = ("spec", "owner", "events", "progress", "reader")
        keys = [*(key(stream_id, name) for name in names), INDEX]
        args = [token, round(LEASE * 1000), self.ttl, round(time.time()), stream_id, *own]
        return int(await self.ask(self._scripts[script](keys=keys, args=args)))

    async def ask(self, answer: Awaitable[Any], more: float = 0.0) -> Any:
        """An answer within the bound, and `more` seconds."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN + more):
                return await answer
        except TimeoutError:
            raise JournalError(f"Redis does not answer within {ANSWER_WITHIN:g} s") from None
        except (RedisError, OSError) as error:
            wrong_type = str(error).startswith("WRONGTYPE")
            raise JournalError(REPLACED if wrong_type else f"Redis: {error}") from None

    async def load(self, stream_id: str, max_bytes: int) -> tuple[StreamState, deque[int]] | None:
        """All of a journal, and the last numbers of its batches; None if there is none."""
        pipe = self.redis.pipeline(transaction=True)
        pipe.get(key(stream_id, "spec"))
        pipe.xrange(key(stream_id, "events"))
        pipe.lrange(key(stream_id, "progress"), 0, -1)
        spec, entries, progress = await self.ask(pipe.execute())
        if spec is None:
            return None
        try:
            state = StreamState(_decode_spec(spec), max_bytes)
            batches = _batches(entries, 1)
            for batch in batches:
                state.apply(batch)
            for items in progress:
                state.advance(_decode_progress(items))
        except msgspec.DecodeError as error:
            raise JournalError(f"the journal cannot be read: {error}") from None
        return state, deque(batch.last for batch in batches)


def _connect(url: str, connections: int) -> Redis:
    """Nothing is sent yet. Raises ValueError for a URL that is none."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=ANSWER_WITHIN,
        protocol=2,
        socket_connect_timeout=ANSWER_WITHIN,
        socket_timeout=BLOCK + ANSWER_WITHIN,
        retry=Retry(NoBackoff(), 1),
    )
    return Redis.from_pool(pool)


def check_url(url: str) -> None:
    """Raises SettingError for a URL that is none; it is not shown, as it may hold a password."""
    try:
        _connect(url, 1)
    except ValueError as error:
        message = f"redis_url (or REDIS_URL) is not allowed: {error}; want redis://host:6379/0"
        raise SettingError(message) from None


def key(stream_id: str, name: str) -> str:
    return f"{PREFIX}{stream_id}:{name}"


def _entry_id(number: int) -> str:
    return f"{number}-0"


def _batches(entries: Sequence[tuple[bytes, dict[bytes, bytes]]], first: int) -> list[Batch]:
    """None of their events has a number before `first`. Raises JournalError."""
    try:
        batches = [_decode_batch(fields[b"b"]) for _, fields in entries]
        if not batches or batches[0].first >= first:
            return batches
    except (msgspec.DecodeError, KeyError):
        raise JournalError(REPLACED) from None
    raise JournalError(REPLACED)


class RedisJournal:
    """One that this process owns."""

    def __init__(self, store: _Store, token: str, state: StreamState, kept: deque[int]) -> None:
        self.state = state
        self._store = store
        self._token = token
        self._busy = asyncio.Lock()  # one script at a time: each says what the last one left
        self._kept = kept  # last numbers of the batches that are kept

    async def append(self, batch: Batch) -> None:
        assert batch.events, "a batch without events would have no id"
        own = msgspec.structs.replace(batch, progress=())
        progress = _encode(batch.progress) if batch.progress else b""
        async with self._busy:
            await self._write(_entry_id(batch.last), _encode(own), progress, len(self._kept) + 1)
            self.state.apply(batch)
        self._kept.append(batch.last)
        while self._kept[0] < self.state.ring.first:
            self._kept.popleft()

    async def renew(self) -> bool:
        async with self._busy:
            return await self._write("", b"", b"", 0) == 2

    async def _write(self, entry: str, batch: bytes, progress: bytes, length: int) -> int:
        last = _entry_id(self.state.ring.next - 1)
        own = (last, entry, batch, progress, length)
        answer = await self._store.run("append", self.state.spec.id, self._token, *own)
        if answer == -1:
            raise JournalLost("another frontend has taken the stream over")
        if answer == -2:
            raise JournalError("Redis does not have the journal any more")
        return answer

    async def close(self) -> None:
        await self._release(0)

    async def remove(self) -> None:
        await self._release(1)

    async def _release(self, remove: int) -> None:
        try:
            await self._store.run("release", self.state.spec.id, self._token, remove)
        except JournalError:  # the lease ends by itself, and the keys with it
            return


class RedisFollower:
    """One that is only read."""

    def __init__(self, store: _Store, state: StreamState) -> None:
        self.state = state
        self._store = store

    async def refresh(self, seconds: float) -> None:
        if self.state.ended:
            return
        events = key(self.state.spec.id, "events")
        block = min(max(seconds, 0.001), BLOCK)
        last = _entry_id(self.state.ring.next - 1)
        answer = await self._store.ask(
            self._store.readers.xread({events: last}, block=round(block * 1000) or 1), block
        )
        if not answer:
            if not await self._store.ask(self._store.redis.exists(key(self.state.spec.id, "spec"))):
                raise JournalLost("Redis does not have the journal any more")
            return
        batches = _batches(answer[0][1], self.state.ring.next)
        if batches[0].first != self.state.ring.next:  # what lies between is not kept any more
            self.state = StreamState(self.state.spec, self.state.ring.max_bytes)
        for batch in batches:
            self.state.apply(batch)

    async def attend(self) -> None:
        reader = key(self.state.spec.id, "reader")
        await self._store.ask(self._store.redis.set(reader, b"1", ex=self._store.ttl))

    async def close(self) -> None:
        self.state.ended = True


class RedisJournals:
    """Those of one Redis. At most `limit`, each with `max_bytes` of events, kept for `ttl` seconds."""

    def __init__(self, url: str, limit: int, max_bytes: int, ttl: float) -> None:
        """Raises ValueError for a URL that is none. Redis may come later."""
        self._store = _Store(url, ttl)
        self._limit = limit
        self._max_bytes = max_bytes

    async def create(self, spec: StreamSpec) -> Journal:
        token = uuid.uuid4().hex
        try:
            made = await self._store.run("create", spec.id, token, _encode(spec), self._limit, PREFIX)
        except JournalError as error:
            raise unavailable(error) from None
        if not made:
            raise full(self._limit)
        return RedisJournal(self._store, token, StreamState(spec, self._max_bytes), deque())

    async def follow(self, stream_id: str) -> RedisFollower | None:
        try:
            found = await self._store.load(stream_id, self._max_bytes)
        except JournalError as error:
            raise unavailable(error) from None
        return None if found is None else RedisFollower(self._store, found[0])

    async def take_over(self, stream_id: str) -> Journal | None:
        token = uuid.uuid4().hex
        try:
            if not await self._store.run("claim", stream_id, token):
                return None
            found = await self._store.load(stream_id, self._max_bytes)
            if found is not None and not found[0].ended:
                return RedisJournal(self._store, token, *found)
            await self._store.run("release", stream_id, token, 0)
        except JournalError:
            return None
        return None

    async def discard(self, stream_id: str) -> None:
        try:
            await self._store.run("discard", stream_id, "")
        except JournalError as error:
            raise unavailable(error) from None

    async def sweep(self) -> None:
        """Redis does it."""
        return

    async def close(self) -> None:
        await self._store.close()
