"""A tier below the pool: which evicted blocks it keeps, which copies are under way, and whether copying a
block back is cheaper than computing it again.

    pool ──demote──▶ slot of the tier ──promote──▶ pool

A slot is a place for one block. Content is found by block hash, and what it holds is compared too. When all
slots are taken, the content used longest ago makes room; never one that is being copied back. The tier only
decides: a `Copy` says what to do, and `demoted` or `promoted` tells how it went.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvmanager.asking.event_log import ON_DISK, REMOVED, STORED, EventLog
from kvmanager.pool.hashing import Content, Held

MAX_DEMOTIONS = 8  # at a time: each keeps a block of the pool out of use while it runs
FIRST_PAUSE = 1.0  # seconds without demotions after one has failed; doubles with each failure in a row
LONGEST_PAUSE = 64.0
RATE_MEMORY = 0.9  # how much of a rate's past counts beside a new sample
RATE_LIFE = 60.0  # seconds after which a rate that nobody measured again is no longer believed


class Copy(NamedTuple):
    """Copy a block of the pool to a slot (a demotion), or a slot to a block of the pool (a promotion)."""

    block: int
    slot: int
    content: Content


class Rate:
    """Amount per second over recent samples, each weighted by its amount."""

    __slots__ = ("_amount", "_measured_at", "_seconds")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._measured_at = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        self._amount = RATE_MEMORY * self._amount + amount
        self._seconds = RATE_MEMORY * self._seconds + seconds
        self._measured_at = now

    def time_of(self, amount: float, now: float) -> float | None:
        """Seconds that `amount` will take; None while there is no recent sample."""
        if not self._amount or now - self._measured_at > RATE_LIFE:
            return None
        return amount * self._seconds / self._amount


class Tier:
    """`num_slots` places; `kept`: what an earlier start left in them, used longest ago first."""

    __slots__ = (
        "_by_slot",
        "_entries",
        "_failures_in_a_row",
        "_free",
        "_paused_until",
        "computing",
        "copying",
        "demoting",
        "demotions",
        "doomed",
        "erasures",
        "failures",
        "log",
        "num_slots",
        "promoting",
        "promotions",
    )

    def __init__(self, num_slots: int, kept: Iterable[tuple[int, Content]] = ()) -> None:
        self.num_slots = num_slots
        self.log = EventLog(1)  # the pool's, as soon as there is one
        self._entries: OrderedDict[bytes, tuple[int, Content]] = OrderedDict(
            (content.block_hash, (slot, content)) for slot, content in kept
        )
        self._by_slot: list[Content | None] = [None] * num_slots
        for slot, content in self._entries.values():
            self._by_slot[slot] = content
        taken = {slot for slot, _ in self._entries.values()}
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in taken]
        self.demoting: dict[bytes, Copy] = {}  # under way, by block hash
        self.promoting: dict[bytes, Copy] = {}
        self.copying = Rate()  # promoted blocks
        self.doomed: set[Copy] = set()  # copies under way of what has been forgotten meanwhile
        self.erasures: list[int] = []  # slots whose content is to be gone from the disk too
        self.computing = Rate()  # prompt tokens, computed by runners
        self.demotions = 0  # that went well, since the start
        self.promotions = 0
        self.failures = 0
        self._failures_in_a_row = 0  # of demotions
        self._paused_until = 0.0

    def attach(self, log: EventLog) -> None:
        """Note there what is found here, now and from now on."""
        self.log = log
        for slot, content in self._entries.values():
            log.stored(content, slot, STORED | ON_DISK)

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether this content is here, or on its way here."""
        return block_hash in self._entries or block_hash in self.demoting

    def find(self, content: Held) -> bool:
        """Whether this content can be copied back, or already is. A hash alone is never trusted."""
        entry = self._entries.get(content[0])
        return entry is not None and entry[1] == content

    @property
    def num_free(self) -> int:
        """Slots that nothing is kept in or on its way to."""
        return len(self._free)

    def contents(self) -> list[tuple[int, Content]]:
        """All that can be found with its slot, used longest ago first (a copy, for audits)."""
        return list(self._entries.values())

    def contents_by_hash(self) -> Mapping[bytes, tuple[int, Content]]:
        """Slot and content of all that can be found; the tier's own, only to look at."""
        return self._entries

    def slots(self, first: int, end: int) -> list[Content | None]:
        """What these slots hold that can be found."""
        return self._by_slot[first:end]

    # --- to the tier ------------------------------------------------------------------------------------

    def demote(self, block: int, content: Content, now: float) -> Copy | None:
        """Begin to copy `block` here, which must not be here yet. None if that cannot be now: too many
        copies, no slot that may be given up, or the last ones failed.
        """
        assert content.block_hash not in self, "the tier already has this content"
        if len(self.demoting) >= MAX_DEMOTIONS or now < self._paused_until:
            return None
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return None
        copy = self.demoting[content.block_hash] = Copy(block, slot, content)
        return copy

    def demoted(self, copy: Copy, good: bool, now: float) -> None:
        """A demotion is over. After a failure there is a pause, longer with each in a row."""
        del self.demoting[copy.content.block_hash]
        if copy in self.doomed:
            self.doomed.remove(copy)
            self._erase(copy.slot)
            return
        if good:
            self._keep(copy.slot, copy.content)
            self.demotions += 1
            self._failures_in_a_row = 0
            return
        self._free.append(copy.slot)
        self.failures += 1
        self._paused_until = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures_in_a_row)
        self._failures_in_a_row = min(self._failures_in_a_row + 1, 16)

    def _evict(self) -> int | None:
        """The slot of the content used longest ago that is not being read."""
        victim = next((key for key in self._entries if key not in self.promoting), None)
        return None if victim is None else self._drop(victim)

    # --- from the tier ----------------------------------------------------------------------------------

    def promote(self, block_hash: bytes, block: int) -> Copy:
        """Begin to copy this content, which `find` has found, into `block`."""
        assert block_hash not in self.promoting, "this content is already being promoted"
        slot, content = self._entries[block_hash]
        self._entries.move_to_end(block_hash)
        copy = self.promoting[block_hash] = Copy(block, slot, content)
        return copy

    def promoted(self, copy: Copy, good: bool, seconds: float, now: float) -> bool:
        """A promotion is over, after `seconds` of copying. Content that could not be read is forgotten. True
        if what was copied is wanted, and right.
        """
        del self.promoting[copy.content.block_hash]
        if copy in self.doomed:
            self.doomed.remove(copy)
            self._erase(copy.slot)
            return False
        if good:
            self.promotions += 1
            self.copying.add(1, seconds, now)
            return True
        self.failures += 1
        self.log.cause = "damaged"
        self._free.append(self._drop(copy.content.block_hash))
        self.log.cause = "capacity"
        return False

    def forget(self, block_hash: bytes) -> None:
        """Content that is here, on its way here, or both; from the disk as well, as soon as it can be."""
        under_way = self.promoting.get(block_hash)
        if block_hash in self._entries:
            slot = self._drop(block_hash)
            if under_way is None or under_way.slot != slot:
                self._erase(slot)
        for copy in (under_way, self.demoting.get(block_hash)):
            if copy is not None:
                self.doomed.add(copy)

    def _erase(self, slot: int) -> None:
        self.erasures.append(slot)
        self._free.append(slot)

    def _keep(self, slot: int, content: Content) -> None:
        """From now on this is found here."""
        self._entries[content.block_hash] = (slot, content)
        self._by_slot[slot] = content
        self.log.stored(content, slot, STORED | ON_DISK)

    def _drop(self, block_hash: bytes) -> int:
        """From now on it is not. Returns its slot."""
        slot, content = self._entries.pop(block_hash)
        self._by_slot[slot] = None
        self.log.removed(content, slot, REMOVED | ON_DISK)
        return slot

    def copy_is_cheaper(self, num_blocks: int, num_tokens: int, now: float) -> bool:
        """Whether copying `num_blocks` back, behind what is under way, takes less time than computing their
        `num_tokens`. While one of the two rates is not known: yes, so that both come to be known.
        """
        copying = self.copying.time_of(num_blocks + len(self.promoting), now)
        computing = self.computing.time_of(num_tokens, now)
        return copying is None or computing is None or copying <= computing
