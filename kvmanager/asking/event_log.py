"""What changes in the cache: the last events, numbered, and by them what became of blocks that are gone.

    stored    content is found from now on, here; once more when another copy of it takes its place
    removed   it is no longer found in that tier, since when, why and for whose request
    cleared   nothing is found any more, anywhere

The numbers rise by one within a start of the manager. A ring keeps the last ones: so does it bound the memory
of what was evicted.
"""

from collections import deque
from itertools import islice
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from kvmanager.messages.events import CacheEvent
from kvmanager.messages.introspection import Cause, own_number
from kvmanager.pool.hashing import NOTHING, TENANT_BYTES, Held

DEFAULT_RING = 1 << 16  # events
OWN_RING = 1 << 12  # events of one tenant
TABLES = 4  # of removals that the ring may fill

Kind = Literal["stored", "removed", "cleared"]
TierName = Literal["pool", "disk"]
RawEvent = tuple[int, float, Kind, TierName, Held, int, Cause | Literal[""], "Asker"]
"""Number, time, kind, tier, content, block; of a removal its cause and asker too."""

STORED, REMOVED, CLEARED = range(3)
ON_DISK = 4
REMOVALS = (REMOVED, REMOVED | ON_DISK)
KINDS: Final[tuple[Kind, ...]] = ("stored", "removed", "cleared")


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
        event = replace(_event(kept), sequence=number, block=own_number(kept[4][0]))
        if not event.request_id or kept[-1].salt.startswith(self._prefix):
            return event
        return replace(event, request_id="")


class EventLog:
    """`size` events are kept. `now`, `asker` and `cause` are what the next events say; who sets them sets
    them back.

    The manager notes several per step and is seldom asked: so they lie here by field, side by side, and none
    is an object of its own.
    """

    __slots__ = (
        "_askers",
        "_blocks",
        "_causes",
        "_contents",
        "_kinds",
        "_looked_up_to",
        "_own",
        "_removals",
        "_times",
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
        self._kinds = [STORED] * size  # with ON_DISK added, or not
        self._times = [0.0] * size
        self._contents: list[Held] = [NOTHING] * size
        self._blocks = [-1] * size
        self._causes: list[Cause] = ["capacity"] * size  # of removals
        self._askers = [NOBODY] * size
        self._own: dict[bytes, OwnEvents] = {}  # by what a tenant's salts begin with; of those that asked
        self._looked_up_to = 0  # number of the last event that was looked at for `_removals` and `_own`
        self._removals: deque[dict[bytes, int]] = deque([{}], maxlen=TABLES + 2)
        """Block hash → number of its last removal, in tables of which the first has the last ones; together
        they have those of the ring.
        """

    def stored(self, content: Held, block: int, kind: int = STORED) -> None:
        self.last = number = self.last + 1
        place = number % self.size
        self._kinds[place] = kind
        self._times[place] = self.now
        self._contents[place] = content
        self._blocks[place] = block

    def removed(self, content: Held, block: int, kind: int = REMOVED) -> None:
        self.last = number = self.last + 1
        place = number % self.size
        self._kinds[place] = kind
        self._times[place] = self.now
        self._contents[place] = content
        self._blocks[place] = block
        self._causes[place] = self.cause
        self._askers[place] = self.asker

    def cleared(self) -> None:
        """Nothing is found any more."""
        self.removed(NOTHING, -1, CLEARED)

    def trim(self) -> None:
        """Begin a new table of removals where the last one has become large, as it then takes long to grow
        and to end; the oldest one ends when the ring has none of its removals any more. To be called now and
        then.
        """
        if len(self._removals[0]) >= self.size // TABLES:
            self._removals.appendleft({})

    def removal(self, block_hash: bytes) -> CacheEvent | None:
        """The last time that this content was removed from where it was; None if that is too long ago."""
        self.catch_up(self.size)
        number = next((table[block_hash] for table in self._removals if block_hash in table), 0)
        return _event(self._raw(number)) if number and self.has(number - 1) else None

    def asker_of(self, event: CacheEvent) -> Asker:
        """For whom something was removed; nobody if it was for no request, or too long ago."""
        kept = event.request_id and self.has(event.sequence - 1)
        return self._askers[event.sequence % self.size] if kept else NOBODY

    def own(self, prefix: bytes) -> OwnEvents:
        """Those of the tenant whose salts begin so."""
        self.catch_up(self.size)
        return self._own.get(prefix) or self._own.setdefault(prefix, OwnEvents(prefix))

    def has(self, after: int) -> bool:
        """Whether all events after that number are still here, and such a number has been."""
        return max(self.last - self.size, 0) <= after <= self.last

    def since(self, after: int, limit: int) -> list[CacheEvent]:
        """At most `limit` events after that number, which must be here."""
        return [_event(kept) for kept in self.raw_since(after, limit)]

    def raw_since(self, after: int, limit: int) -> list[RawEvent]:
        """The same, without their names."""
        assert self.has(after)
        return [self._raw(number) for number in range(after + 1, min(after + limit, self.last) + 1)]

    def _raw(self, number: int) -> RawEvent:
        place = number % self.size
        kind = KINDS[self._kinds[place] & ~ON_DISK]
        removal = kind == "removed"
        return (
            number,
            self._times[place],
            kind,
            "disk" if self._kinds[place] & ON_DISK else "pool",
            self._contents[place],
            self._blocks[place],
            self._causes[place] if kind != "stored" else "",
            self._askers[place] if removal else NOBODY,
        )

    @property
    def behind(self) -> int:
        """Events that were not looked at. `removal` and `own` look at all of them, which takes its time where
        they are many; nobody else needs that.
        """
        return min(self.last - self._looked_up_to, self.size)

    @property
    def is_followed(self) -> bool:
        """Whether tenants have asked for events of their own, so that none must be missed."""
        return bool(self._own)

    def catch_up(self, limit: int) -> None:
        """Look at so many events at most."""
        first = max(self._looked_up_to, self.last - self.size) + 1
        for own in self._own.values() if first > self._looked_up_to + 1 else ():
            own.leap()
        end = min(first + limit, self.last + 1)
        size, kinds, contents, removals = self.size, self._kinds, self._contents, self._removals[0]
        for number in range(first, end):
            place = number % size
            digest, _, salt, _ = contents[place]
            if kinds[place] in REMOVALS:
                removals[digest] = number
            if salt and (mine := self._own.get(salt[:TENANT_BYTES])) is not None:
                mine.take(self._raw(number))
        self._looked_up_to = end - 1


def _event(kept: RawEvent) -> CacheEvent:
    number, time, kind, tier, (digest, parent_hash, salt, tokens), block, cause, asker = kept
    tokens = tokens if kind == "stored" else b""
    return CacheEvent(
        number, time, kind, tier, digest, parent_hash, tokens, salt, block, cause, asker.request_id
    )
