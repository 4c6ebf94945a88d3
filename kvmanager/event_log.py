"""What changes in the cache: the last events, numbered, and by them what became of blocks that are gone.

    stored    content is found from now on, here; once more when another copy of it takes its place
    removed   it is no longer found in that tier, since when, why and for whose request
    cleared   nothing is found any more, anywhere

The numbers rise by one within a start of the manager. A ring keeps the last ones: so does it bound the memory
of what was evicted.
"""

from typing import Literal, NamedTuple

from kvmanager.event_messages import CacheEvent

DEFAULT_RING = 1 << 16  # events

TierName = Literal["pool", "disk"]


class Asker(NamedTuple):
    """For whose sake something happens: a request, and the salt of what it may see; nobody has no name."""

    request_id: str
    salt: bytes


NOBODY = Asker("", b"")


class EventLog:
    """`size` events are kept. `now`, `asker` and `cause` are what the next events say; who sets them sets
    them back.
    """

    __slots__ = (
        "_askers",
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
        self.cause = "capacity"
        self.other_layout: dict[bytes, float] = {}
        """Hash under this layout of what a pool of another one held when it was emptied → when (seconds)."""
        self._ring: list[CacheEvent | None] = [None] * size
        self._askers: dict[int, bytes] = {}  # number of a removal for a request → that one's salt
        self._removals: dict[bytes, int] = {}  # block hash → number of its last removal

    def stored(
        self,
        block_hash: bytes,
        parent_hash: bytes,
        tokens: bytes,
        salt: bytes,
        block: int,
        tier: TierName = "pool",
    ) -> None:
        number = self.last + 1
        self._add(
            CacheEvent(number, self.now, "stored", tier, block_hash, parent_hash, tokens, salt, block), number
        )

    def removed(
        self, block_hash: bytes, parent_hash: bytes, salt: bytes, block: int, tier: TierName = "pool"
    ) -> None:
        number = self.last + 1
        asker = self.asker
        event = CacheEvent(
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
            asker.request_id,
        )
        self._add(event, number)
        self._removals[block_hash] = number
        if asker.request_id:
            self._askers[number] = asker.salt

    def cleared(self) -> None:
        """Nothing is found any more."""
        self._add(CacheEvent(self.last + 1, self.now, "cleared", cause=self.cause), self.last + 1)

    def removal(self, block_hash: bytes) -> CacheEvent | None:
        """The last time that this content was removed from where it was; None if that is too long ago."""
        number = self._removals.get(block_hash)
        return None if number is None else self._ring[number % self.size]

    def asker_of(self, event: CacheEvent) -> Asker:
        """For whom something was removed; nobody if it was for no request."""
        return Asker(event.request_id, self._askers.get(event.sequence, b""))

    def has(self, after: int) -> bool:
        """Whether all events after that number are still here, and such a number has been."""
        return self.last - self.size <= after <= self.last

    def since(self, after: int, limit: int) -> list[CacheEvent]:
        """At most `limit` events after that number, which must be here."""
        assert self.has(after)
        first, end = after + 1, min(after + limit, self.last) + 1
        start, stop = first % self.size, end % self.size
        if first == end:
            return []
        ring = self._ring
        part = ring[start:stop] if start < stop else ring[start:] + ring[:stop]
        return [event for event in part if event is not None]

    def _add(self, event: CacheEvent, number: int) -> None:
        """In place of the oldest, and of what that one is the only memory of."""
        place = number % self.size
        old = self._ring[place]
        if old is not None and old.kind == "removed":
            self._askers.pop(old.sequence, None)
            if self._removals.get(old.block_hash) == old.sequence:
                del self._removals[old.block_hash]
        self._ring[place] = event
        self.last = number
