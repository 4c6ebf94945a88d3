"""What changes in the cache: the last events, numbered, and by them what became of blocks that are gone.

    stored    content is found from now on, here; once more when another copy of it takes its place
    removed   it is no longer found in that tier, since when, why and for whose request
    cleared   nothing is found any more, anywhere

The numbers rise by one within a start of the manager. A ring keeps the last ones: so does it bound the memory
of what was evicted.
"""

from typing import Final, Literal, NamedTuple

from kvmanager.messages.events import CacheEvent
from kvmanager.messages.introspection import Cause
from kvmanager.pool.hashing import NOTHING, Held

DEFAULT_RING = 1 << 16  # events

Kind = Literal["stored", "removed", "cleared"]
TierName = Literal["pool", "disk"]
RawEvent = tuple[int, float, Kind, TierName, Held, int, Cause | Literal[""], "Asker"]
"""Number, time, kind, tier, content, block; of a removal its cause and asker too."""

STORED, REMOVED, CLEARED = range(3)
ON_DISK = 4
KINDS: Final[tuple[Kind, ...]] = ("stored", "removed", "cleared")


class Asker(NamedTuple):
    """For whose sake something happens: a request, and the salt of what it may see; nobody has no name."""

    request_id: str
    salt: bytes


NOBODY = Asker("", b"")


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
        "_older_removals",
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
        self._looked_up_to = 0  # number of the last event that was looked at for `_removals`, when asked
        self._removals: dict[bytes, int] = {}  # block hash → number of its last removal
        self._older_removals: dict[
            bytes, int
        ] = {}  # those before `size` others; together they hold the ring's

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
        """Forget the oldest removals; to be called now and then. Half of the events are removals at most, in
        the long run, and a table that grows further takes long to do so.
        """
        if len(self._removals) >= self.size // 2:
            self._removals, self._older_removals = {}, self._removals

    def removal(self, block_hash: bytes) -> CacheEvent | None:
        """The last time that this content was removed from where it was; None if that is too long ago."""
        for number in range(max(self._looked_up_to, self.last - self.size) + 1, self.last + 1):
            if self._kinds[number % self.size] & ~ON_DISK == REMOVED:
                self._removals[self._contents[number % self.size][0]] = number
        self._looked_up_to = self.last
        number = self._removals.get(block_hash) or self._older_removals.get(block_hash, 0)
        return _event(self._raw(number)) if number and self.has(number - 1) else None

    def asker_of(self, event: CacheEvent) -> Asker:
        """For whom something was removed; nobody if it was for no request, or too long ago."""
        kept = event.request_id and self.has(event.sequence - 1)
        return self._askers[event.sequence % self.size] if kept else NOBODY

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


def _event(kept: RawEvent) -> CacheEvent:
    number, time, kind, tier, (digest, parent_hash, salt, tokens), block, cause, asker = kept
    tokens = tokens if kind == "stored" else b""
    return CacheEvent(
        number, time, kind, tier, digest, parent_hash, tokens, salt, block, cause, asker.request_id
    )
