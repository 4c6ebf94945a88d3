"""Events in the wire format of vLLM's publisher, so that routers that go by where a prefix is cached can
follow.

    PUB      [topic][sequence: 8 bytes, big-endian][batch]
    replay   a request [""][first sequence: 8 bytes] is answered with [""][sequence][batch] for each batch
             from there on that is still kept, then [""][-1: 8 bytes][""]
    batch    MessagePack of [time, [event …]]
    event    {"type": "BlockStored", "block_hashes": [hash], "parent_block_hash": hash or nil, …: see FIELDS}
             {"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU"}
             {"type": "AllBlocksCleared"}

Events are maps since vLLM 0.24; consumers of before want arrays of the same values, in this order. Batches
are arrays for both; more fields than one knows are ignored. Hashes are the
last 64 bits of ours as unsigned integers: that is vLLM's default, and decodes where integers are wanted and
where bytes are allowed too. "GPU" is the pool, wherever it is; the tier is not published, as a consumer that
does not look at the medium would take its removals for the pool's. Nor are partial blocks, and content is
stored once, however many copies there are.

Numbers go on over restarts, as each start begins far above the last one's: a follower sees a gap, asks for a
replay, and gets AllBlocksCleared and all that is found now, as everybody does who asks for more than is kept.

A batch is encoded only if somebody subscribes or asks for a replay.
"""

from collections import deque
from collections.abc import Container, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from kvmanager.asking.event_log import NOBODY, RawEvent
from kvmanager.errors import PagekeeperError
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import NOTHING

MAX_BATCH: Final = 256  # events; also of replays between which the manager does its own work
MAX_KEPT: Final = 10_000  # batches, for replays
MAX_RECEIVED: Final = 256  # messages at a time
MAX_REPLAYED: Final = 64  # batches at a time
MAX_REPLAYS: Final = 64  # at once; of more the oldest gives up, and its follower asks again
HIGH_WATER_MARK: Final = 10_000  # messages of a follower that does not read: further ones are lost to it
MEDIUM: Final = "GPU"
END: Final = (-1).to_bytes(8, "big", signed=True)

STORED: Final = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys"),
)
FIELDS: Final = {
    "BlockStored": STORED,
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}
"""Names of the values, by the first of them."""

Batch = tuple[BlockPool, float, list[RawEvent]]
CLEARED: Final[RawEvent] = (0, 0.0, "cleared", "pool", NOTHING, -1, "", NOBODY)

_encode = msgspec.msgpack.Encoder().encode


class EventPublisher:
    """Two sockets and what replays need; `first` is the number of the first batch. Never waits. Raises
    PagekeeperError if it cannot listen.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        replay_endpoint: str,
        topic: str,
        first: int,
        form: str = "array",
    ) -> None:
        self._form = form
        self._topic = topic.encode()
        self._paths: list[Path] = []
        self._publish = self._bind(context, zmq.XPUB, endpoint)
        self._replay = self._bind(context, zmq.ROUTER, replay_endpoint)
        self._subscriptions: set[bytes] = set()
        self._kept: deque[Batch] = deque(maxlen=MAX_KEPT)
        self._next = first  # sequence number of the next batch
        self._replays: dict[
            bytes, Iterator[tuple[bytes, Batch | None]]
        ] = {}  # what is still to be sent to whom
        self._known: set[bytes] = set()  # hashes that were published as stored
        self._pool: BlockPool | None = None
        self._seen = 0  # the last event of the pool that is published or passed over
        self._untold = range(0)  # blocks whose content is still to be told, since all started over

    @property
    def sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        """That are to be polled: `turn` reads them."""
        return (self._publish, self._replay)

    @property
    def busy(self) -> bool:
        """Whether `turn` should come again at once."""
        return bool(self._replays or self._untold)

    def attach(self, pool: BlockPool, now: float) -> None:
        """Follow this pool: all that followers knew before is void."""
        self._pool = pool
        self._seen = 0
        self._start_over(pool, now)

    def turn(self, ready: Container[object]) -> None:
        """Publish what is new, and go on with replays; read those of the `sockets` that are ready."""
        if self._publish in ready:
            self._read_subscriptions()
        if self._pool is not None:
            self._follow(self._pool)
            self._tell(self._pool)
        if self._replay in ready:
            self._read_requests()
        self._go_on_replaying()

    def close(self) -> None:
        self._publish.close()
        self._replay.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _bind(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str
    ) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, 256)  # of what is received: subscriptions and requests
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise PagekeeperError("internal", f"cannot publish events on {endpoint}: {error}") from error
        if endpoint.startswith("ipc://"):
            self._paths.append(Path(endpoint.removeprefix("ipc://")))
            self._paths[-1].chmod(0o600)
        return socket

    # --- publishing ---------------------------------------------------------------------------------------

    def _follow(self, pool: BlockPool) -> None:
        log = pool.log
        if not log.has(self._seen):
            self._start_over(pool, log.now)
        while self._seen < log.last:
            events = log.raw_since(self._seen, MAX_BATCH)
            self._seen = events[-1][0]
            self._send(pool, events[-1][1], [event for event in events if self._is_news(pool, event)])

    def _start_over(self, pool: BlockPool, now: float) -> None:
        """Nothing holds that was published before. If not all events of the pool are left, what is found has
        to be told, turn by turn.
        """
        self._known.clear()
        self._untold = range(0)
        self._send(pool, now, [CLEARED])
        if not pool.log.has(0):
            self._seen = pool.log.last
            self._untold = range(pool.num_blocks)

    def _tell(self, pool: BlockPool) -> None:
        """Some of it: what was stored since then is published already, and told once."""
        part, self._untold = self._untold[:MAX_BATCH], self._untold[MAX_BATCH:]
        found = [block for block in part if pool.block_hash[block] and block not in pool.unfound]
        events = [event_of(pool, block) for block in found]
        self._send(pool, pool.log.now, [event for event in events if self._is_news(pool, event)])

    def _is_news(self, pool: BlockPool, event: RawEvent) -> bool:
        """Whether it is to be published, with respect to what was."""
        _, _, kind, tier, (digest, _, _, tokens), *_ = event
        known = self._known
        if kind == "cleared":
            known.clear()
            return True
        if tier != "pool" or (digest in known) == (kind == "stored"):
            return False
        if kind == "removed":
            known.remove(digest)
            return True
        if len(tokens) == pool.block_bytes:
            known.add(digest)
            return True
        return False

    def _send(self, pool: BlockPool, time: float, events: list[RawEvent]) -> None:
        if not events:
            return
        self._kept.append((pool, time, events))
        if any(self._topic.startswith(each) for each in self._subscriptions):
            frames = (self._topic, numbered(self._next), encode_batch(self._kept[-1], self._form))
            self._publish.send_multipart(frames, zmq.DONTWAIT)
        self._next += 1

    def _read_subscriptions(self) -> None:
        for frame, *_ in received(self._publish):
            if frame[:1] == b"\1":
                self._subscriptions.add(frame[1:])
            elif frame[:1] == b"\0":
                self._subscriptions.discard(frame[1:])

    # --- replays ------------------------------------------------------------------------------------------

    def _read_requests(self) -> None:
        for frames in received(self._replay):
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            self._replays.pop(frames[0], None)
            self._replays[frames[0]] = self._replay_from(int.from_bytes(frames[2], "big"))
            if len(self._replays) > MAX_REPLAYS:
                del self._replays[next(iter(self._replays))]

    def _go_on_replaying(self) -> None:
        """Some batches for the one that has waited longest."""
        if not self._replays:
            return
        identity = next(iter(self._replays))
        replay = self._replays.pop(identity)
        encoded = 0
        for number, batch in islice(replay, MAX_REPLAYED):
            payload = encode_batch(batch, self._form) if batch is not None else b""
            self._replay.send_multipart((identity, b"", number, payload), zmq.DONTWAIT)
            if batch is None:
                return
            encoded += len(batch[2])
            if encoded >= MAX_BATCH:
                break
        self._replays[identity] = replay

    def _replay_from(self, start: int) -> Iterator[tuple[bytes, Batch | None]]:
        """Numbers and batches. Where not all is left that was published since, first what is found now, under
        the last numbers before the next.
        """
        if start < self._next - len(self._kept) and self._pool is not None:
            pool, start = self._pool, self._next
            first = start + -pool.num_blocks // MAX_BATCH
            yield numbered(first - 1), (pool, pool.log.now, [CLEARED])
            told: set[bytes] = set()
            for number in range(first, start):
                block = (number - first) * MAX_BATCH
                yield numbered(number), self._found(pool, range(block, block + MAX_BATCH), told)
        while start < self._next and (place := start - self._next + len(self._kept)) >= 0:
            yield numbered(start), self._kept[place]
            start += 1
        yield END, None

    def _found(self, pool: BlockPool, blocks: range, told: set[bytes]) -> Batch:
        """What these blocks hold that was published and is not `told`. What comes and goes meanwhile is
        published behind it.
        """
        events = []
        for block in blocks[: max(pool.num_blocks - blocks.start, 0)]:
            digest = pool.block_hash[block]
            if digest in self._known and digest not in told and block not in pool.unfound:
                told.add(digest)
                events.append(event_of(pool, block))
        return (pool, pool.log.now, events)


def received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """What lies there, but not more than a bound."""
    for _ in range(MAX_RECEIVED):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


def event_of(pool: BlockPool, block: int) -> RawEvent:
    """The event by which this block's content would become known."""
    return (0, pool.log.now, "stored", "pool", pool.contents[block], block, "", NOBODY)


def numbered(number: int) -> bytes:
    return number.to_bytes(8, "big")


def encode_batch(batch: Batch, form: str) -> bytes:
    pool, time, events = batch
    values = [as_published(pool, event) for event in events]
    if form == "array":
        return _encode((time, values))
    return _encode((time, [dict(zip(FIELDS[each[0]], each, strict=True)) for each in values]))


def as_published(pool: BlockPool, event: RawEvent) -> tuple[Any, ...]:
    """The event as vLLM's consumers know it."""
    _, _, kind, _, (digest, parent, salt, tokens), *_ = event
    if kind == "cleared":
        return ("AllBlocksCleared",)
    if kind == "removed":
        return ("BlockRemoved", (short(digest),), MEDIUM)
    return (
        "BlockStored",
        (short(digest),),
        None if parent == pool.root else short(parent),
        tuple(memoryview(tokens).cast("I")),
        pool.block_size,
        None,
        MEDIUM,
        None,
        ((salt.hex(),),) if salt else None,
    )


def short(digest: bytes) -> int:
    """The last 64 bits, as vLLM shortens its own."""
    return int.from_bytes(digest[-8:], "big")
