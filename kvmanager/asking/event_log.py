"""What changes in the cache: the last events, numbered, and by them what became of blocks that are gone.

    stored    content is found from now on, here; once more when another copy of it takes its place
    removed   it is no longer found in that tier, since when, why and for whose request
    cleared   nothing is found any more, anywhere

The numbers rise by one within a start of the manager. A ring keeps the last ones: so does it bound the memory
of what was evicted.
"""

from collections import deque
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from kvmanager.messages.events import CacheEvent
from kvmanager.messages.introspection import Cause, own_number
from kvmanager.pool.hashing import TENANT_BYTES

DEFAULT_RING = 1 << 16  # events
OWN_RING = 1 << 12  # events of one tenant
PLAIN: Final = 9  # fields of an event without cause and asker

RawEvent = tuple[Any, ...]
"""Number, time, kind, tier, hash, parent hash, tokens, salt, block; of a removal its cause and asker too."""

TierName = Literal["pool", "disk"]


class Asker(NamedTuple):
    """For whose sake something happens: a request, and the salt of what it may see; nobody has no name."""

    request_id: str
    salt: bytes


NOBODY = Asker("", b"")


class OwnEvents:
    """A tenant's own events with numbers of their own, from when it first asked: whatever others do, it reads
    the same. Names of others' requests are left out.
    """

    __slots__ = ("_kept", "_prefix", "last")

    def __init__(self, prefix: bytes) -> None:
        self.last = 0
        self._prefix = prefix  # of the tenant's salts
        self._kept: deque[RawEvent] = deque(maxlen=OWN_RING)

    def take(self, kept: RawEvent) -> None:
        self.last += 1
        self._kept.append(kept)

    def leap(self) -> None:
        """Some were lost."""
        self.last += 1
        self._kept.clear()

    def has(self, after: int) -> bool:
        """As of `EventLog`."""
        return self.last - len(self._kept) <= after <= self.last

    def since(self, after: int, limit: int) -> list[CacheEvent]:
        """As of `EventLog`."""
        assert self.has(after)
        start = after - (self.last - len(self._kept))
        kept = islice(self._kept, start, start + limit)
        return [self._told(number, each) for number, each in enumerate(kept, after + 1)]

    def _told(self, number: int, kept: RawEvent) -> CacheEvent:
        event = replace(_event(kept), sequence=number, block=own_number(kept[4]))
        if not event.request_id or kept[-1].salt.startswith(self._prefix):
            return event
        return replace(event, request_id="")


class EventLog:
    """`size` events are kept. `now`, `asker` and `cause` are what the next events say; who sets them sets
    them back.

    The manager notes several per step and is seldom asked: they lie here as plain tuples, in the order of
    `CacheEvent`'s fields, and a removal's ends with its asker.
    """

    __slots__ = (
        "_looked_up_to",
        "_older_removals",
        "_own",
        "_removals",
        "_ring",
        "asker",
        "cause",
        "last",
        "now",
        "other_layout",
        "size",
    )

    def __init__(self, size: int = DEFAULT_RING) -> None:
        self.size = size
        self.last = 0  # number of the last event; 0: there was none
        self.now = 0.0  # seconds, Unix time
        self.asker = NOBODY
        self.cause: Cause = "capacity"
        self.other_layout: dict[bytes, float] = {}
        """Hash under this layout of what a pool of another one held when it was emptied → when (seconds)."""
        self._ring: list[RawEvent] = [()] * size
        self._own: dict[bytes, OwnEvents] = {}  # by what a tenant's salts begin with; of those that asked
        self._looked_up_to = 0  # number of the last event that was looked at for `_removals` and `_own`
        self._removals: dict[bytes, int] = {}  # block hash → number of its last removal
        self._older_removals: dict[
            bytes, int
        ] = {}  # those before `size` others; together they hold the ring's

    def stored(
        self,
        block_hash: bytes,
        parent_hash: bytes,
        tokens: bytes,
        salt: bytes,
        block: int,
        tier: TierName = "pool",
    ) -> None:
        self.last = number = self.last + 1
        self._ring[number % self.size] = (
            number,
            self.now,
            "stored",
            tier,
            block_hash,
            parent_hash,
            tokens,
            salt,
            block,
        )

    def removed(
        self, block_hash: bytes, parent_hash: bytes, salt: bytes, block: int, tier: TierName = "pool"
    ) -> None:
        self.last = number = self.last + 1
        self._ring[number % self.size] = (
            number,
            self.now,
            "removed",
            tier,
            block_hash,
            parent_hash,
            b"",
            salt,
            block,
            self.cause,
            self.asker,
        )

    def cleared(self) -> None:
        """Nothing is found any more."""
        self.last = number = self.last + 1
        self._ring[number % self.size] = (
            number,
            self.now,
            "cleared",
            "pool",
            b"",
            b"",
            b"",
            b"",
            -1,
            self.cause,
            NOBODY,
        )

    def trim(self) -> None:
        """Look at the latest events, and forget the oldest removals; to be called now and then. Half of the
        events are removals at most, in the long run, and a table that grows further takes long to do so.
        """
        self._catch_up()
        if len(self._removals) >= self.size // 2:
            self._removals, self._older_removals = {}, self._removals

    def removal(self, block_hash: bytes) -> CacheEvent | None:
        """The last time that this content was removed from where it was; None if that is too long ago."""
        self._catch_up()
        number = self._removals.get(block_hash) or self._older_removals.get(block_hash, 0)
        return _event(self._ring[number % self.size]) if number and self.has(number - 1) else None

    def asker_of(self, event: CacheEvent) -> Asker:
        """For whom something was removed; nobody if it was for no request, or too long ago."""
        kept = self._ring[event.sequence % self.size]
        return kept[-1] if event.request_id and kept[0] == event.sequence else NOBODY

    def own(self, prefix: bytes) -> OwnEvents:
        """Those of the tenant whose salts begin so."""
        self._catch_up()
        return self._own.get(prefix) or self._own.setdefault(prefix, OwnEvents(prefix))

    def has(self, after: int) -> bool:
        """Whether all events after that number are still here, and such a number has been."""
        return max(self.last - self.size, 0) <= after <= self.last

    def since(self, after: int, limit: int) -> list[CacheEvent]:
        """At most `limit` events after that number, which must be here."""
        return [_event(kept) for kept in self.raw_since(after, limit)]

    def raw_since(self, after: int, limit: int) -> list[RawEvent]:
        """The same, as they lie here."""
        assert self.has(after)
        numbers = range(after + 1, min(after + limit, self.last) + 1)
        return [self._ring[number % self.size] for number in numbers]

    def _catch_up(self) -> None:
        first = max(self._looked_up_to, self.last - self.size) + 1
        for own in self._own.values() if first > self._looked_up_to + 1 else ():
            own.leap()
        ring, size, removals = self._ring, self.size, self._removals
        for number in range(first, self.last + 1):
            kept = ring[number % size]
            if kept[2] == "removed":
                removals[kept[4]] = number
            if kept[7] and (mine := self._own.get(kept[7][:TENANT_BYTES])) is not None:
                mine.take(kept)
        self._looked_up_to = self.last


def _event(kept: RawEvent) -> CacheEvent:
    event = CacheEvent(*kept[:PLAIN])
    if len(kept) == PLAIN:
        return event
    return replace(event, cause=kept[PLAIN], request_id=kept[PLAIN + 1].request_id)
