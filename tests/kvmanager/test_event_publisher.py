"""The events for routers over real sockets: what vLLM's consumers decode, and a follower that ends equal to
the pool whatever it has lost, whatever came twice, and over a restart.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvmanager import event_publisher
from kvmanager.asking.event_log import EventLog
from kvmanager.errors import PagekeeperError
from kvmanager.event_publisher import END, EventPublisher, short
from kvmanager.pool.block_pool import CACHED, BlockPool
from kvmanager.pool.hashing import content, salt_digest, token_array
from kvmanager.pool.ledger import Holder
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT

PATIENCE = 2000  # turns, of a few milliseconds at most


class Stored(msgspec.Struct):
    """What all consumers know of it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class Tagged(msgspec.Struct, array_like=True, tag=True):
    """As the consumers declare it; fields that they do not know are ignored."""


class BlockStored(Stored, array_like=True, tag=True):
    pass


class BlockRemoved(Tagged):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Tagged):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Mapped(msgspec.Struct, tag=True):
    """The same since 0.24; a field without a default must be there."""


class MappedStored(Stored, tag="BlockStored"):
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class MappedRemoved(Mapped, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class MappedCleared(Mapped, tag="AllBlocksCleared"):
    pass


class MappedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[MappedStored | MappedRemoved | MappedCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode
decode_mapped = msgspec.msgpack.Decoder(MappedBatch).decode


class Router:
    """A consumer. `chance` decides what it loses, and what it gets twice."""

    def __init__(self, endpoint: str, replay: str, chance: random.Random, turn: Callable[[], None]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.subscription = self.context.socket(zmq.SUB)
        self.replay = self.context.socket(zmq.DEALER)
        for socket, address in ((self.subscription, endpoint), (self.replay, replay)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        self.subscription.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.chance = chance
        self.turn = turn
        self.last = -1
        self.replays = 0
        self.found: set[int] = set()

    def close(self) -> None:
        self.context.destroy()

    def read(self, loss: float) -> None:
        """What has come by now."""
        while self.subscription.poll(1):
            topic, number, payload = self.subscription.recv_multipart()
            assert topic == b"kv-events"
            if self.chance.random() >= loss:
                for _ in range(self.chance.choice([1, 1, 2])):
                    self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number > self.last + 1:
            self.catch_up()
        if number == self.last + 1:
            self.apply(payload)
            self.last = number

    def catch_up(self) -> None:
        """Ask for what is missing."""
        self.replays += 1
        self.replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        for _ in range(PATIENCE):
            self.turn()
            while self.replay.poll(2):
                empty, number, payload = self.replay.recv_multipart()
                assert empty == b""
                if number == END:
                    assert payload == b""
                    return
                if int.from_bytes(number, "big") > self.last:
                    self.apply(payload)
                    self.last = int.from_bytes(number, "big")
        raise AssertionError("no end of the replay")

    def apply(self, payload: bytes) -> None:
        for event in decode(payload).events:
            match event:
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes) == BLOCK_SIZE
                    assert event.medium == "GPU"
                    self.found.update(event.block_hashes)
                case BlockRemoved():
                    self.found.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.found.clear()


class Place:
    """A publisher in a folder, and pools that come and go under it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events.sock", f"ipc://{folder}/replay.sock"
        self.holder = Holder(bytes(8))
        self.starts = 0
        self.start(BlockPool(8, LAYOUT, EventLog(64)))

    def start(self, pool: BlockPool) -> None:
        """One start of the manager."""
        self.pool = pool
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.starts += 1
        first = self.starts * 1_000_000
        self.publisher = EventPublisher(self.context, self.endpoint, self.replay, "kv-events", first)
        self.publisher.attach(pool, 1.0)

    def restart(self) -> None:
        """On what is cached now; everything else is gone."""
        restored = BlockPool(8, LAYOUT, EventLog(64))
        cached = [block for block in range(8) if self.pool.state[block] == CACHED]
        restored.restore_all({block: self.pool.record(block) for block in cached})
        self.close()
        self.start(restored)

    def turn(self) -> None:
        self.publisher.turn(self.publisher.sockets)

    def store(self, chance: random.Random) -> None:
        """A new block, full or not, behind another one or at the beginning; perhaps a copy of one."""
        parents = [self.pool.root, *(digest for digest in self.pool.block_hash if digest)]
        length = chance.choice([BLOCK_SIZE, BLOCK_SIZE, 2])
        tokens = token_array(chance.choices([1, 2], k=length)).tobytes()
        block = self.pool.grant(self.holder)
        salt = salt_digest(chance.choice(["", "", "mine"]))
        seal = self.pool.seal if length == BLOCK_SIZE else self.pool.seal_tail
        seal(block, content(chance.choice(parents[:3]), tokens, salt), 1.0)
        self.pool.release(block, self.holder)

    def truth(self) -> set[int]:
        pool = self.pool
        full = (block for block in range(8) if len(pool.tokens[block]) == pool.block_bytes)
        return {short(pool.block_hash[block]) for block in full}

    def close(self) -> None:
        self.publisher.close()
        self.context.term()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def router_of(place: Place, seed: int) -> Router:
    """Connected, and what it subscribes to is known."""
    router = Router(place.endpoint, place.replay, random.Random(seed), place.turn)
    wait_for_subscription(place, router)
    return router


def wait_for_subscription(place: Place, router: Router) -> None:
    for _ in range(PATIENCE):
        place.turn()
        if place.publisher._subscriptions:
            return
        router.subscription.poll(0)  # by which it subscribes again where it has connected again
        router.replay.poll(2)  # nothing comes there: it only waits
    raise AssertionError("nobody has subscribed")


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_follower_ends_equal_to_the_pool(place: Place, loss: float) -> None:
    router, chance = router_of(place, 1), random.Random(2)
    for step in range(300):
        place.store(chance)
        if chance.random() < 0.05:
            place.pool.log.cause = "evict"
            block = next(place.pool.evictable())
            place.pool.evict(block)
        place.turn()
        if step == 150:
            place.restart()
            wait_for_subscription(place, router)
        if chance.random() < 0.1:
            router.read(loss)
    router.read(loss)
    router.catch_up()
    assert router.found == place.truth()
    assert bool(router.replays > 3) == bool(loss)
    router.close()


def test_what_is_published_is_what_vllms_consumers_know(place: Place) -> None:
    """The whole batch, with every field."""
    pool, holder = place.pool, place.holder
    pool.log.now = 7.0
    first, second, tail = (pool.grant(holder) for _ in range(3))
    held = [content(pool.root, token_array([1, 2, 3, 4]).tobytes(), b"")]
    head = held[-1][0]
    held.append(content(head, token_array([5, 6, 7, 1 << 31]).tobytes(), salt_digest("s")))
    below = held[-1][0]
    held.append(content(below, token_array([9]).tobytes(), b""))
    pool.seal(first, held[0], 0.0)
    pool.seal(second, held[1], 0.0)
    pool.seal_tail(tail, held[2], 0.0)
    place.turn()
    kept = place.publisher._kept
    batches = [msgspec.msgpack.decode(event_publisher.encode_batch(each, "array")) for each in kept]
    assert [decode(msgspec.msgpack.encode(batch)).ts for batch in batches] == [batch[0] for batch in batches]
    mapped = [decode_mapped(event_publisher.encode_batch(each, "map")) for each in kept]
    for old, new in zip(batches, mapped, strict=True):
        for values, event in zip(old[1], new.events, strict=True):
            names = event.__struct_fields__[: len(values) - 1]
            said = msgspec.msgpack.encode([getattr(event, name) for name in names])
            assert values[1:] == msgspec.msgpack.decode(said)
    assert batches[0] == [1.0, [["AllBlocksCleared"]]]
    assert batches[1] == [
        7.0,
        [
            ["BlockStored", [short(head)], None, [1, 2, 3, 4], 4, None, "GPU", None, None],
            [
                *("BlockStored", [short(below)], short(head), [5, 6, 7, 1 << 31], 4, None, "GPU", None),
                [[salt_digest("s").hex()]],
            ],
        ],
    ]
    assert 0 <= short(head) == int.from_bytes(head, "big") % (1 << 64)


def test_copies_are_stored_and_removed_once(place: Place) -> None:
    pool, holder = place.pool, place.holder
    tokens = token_array([1, 2, 3, 4]).tobytes()
    blocks = [pool.grant(holder) for _ in range(2)]
    for block in blocks:
        pool.seal(block, content(pool.root, tokens, b""), 0.0)
        pool.release(block, holder)
    for block in blocks:
        place.turn()
        pool.evict(block)
    place.turn()
    kinds = [event[2] for _, _, events in place.publisher._kept for event in events]
    assert kinds == ["cleared", "stored", "removed"]


def test_the_sockets_are_their_owners_alone_and_go_with_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.sock")} == {0o600}
    place.close()
    assert list(tmp_path.glob("*.sock")) == []


def test_an_endpoint_that_cannot_be_is_named(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(PagekeeperError, match="cannot publish events on tcp://nowhere"):
        EventPublisher(context, "tcp://nowhere:1", f"ipc://{tmp_path}/r", "t", 0)
    context.destroy()


def test_nonsense_is_passed_over(place: Place) -> None:
    """Whatever is sent to either socket, the publisher goes on; who asks for much gets it in parts."""
    router = router_of(place, 3)
    chance = random.Random(4)
    for frames in ([b""], [b"", b"short"], [b"x"] * 5, [b"", b"\0" * 9]):
        router.replay.send_multipart(frames)
    for _ in range(200):
        place.store(chance)
        place.turn()
    router.catch_up()
    assert router.found == place.truth()
    router.close()
