"""The disk tier in the simulator: copies that take their time, fail, and are cut short by the manager's
death.
"""

from random import Random
from typing import Final, NamedTuple

from kvmanager.pool.hashing import Content
from kvmanager.state import Effects
from kvmanager.tier.tiers import Copy

FAILURE_RATE: Final = 0.05
STEP_RATE: Final = 0.5  # with which a copy under way ends at the manager's next tick
JUNK: Final = -1


class Slot(NamedTuple):
    """A good one: what is torn is no slot at all, as its checksums say."""

    serial: int
    content: Content
    cells: list[int]


class TierFile:
    """What outlives the manager."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: dict[int, Slot] = {}
        self.serial = 0

    def kept(self) -> list[tuple[int, Content]]:
        """As `kvmanager.tier.tier_file`: in the order of writing, of equal contents the newest."""
        newest: dict[bytes, tuple[int, int, Content]] = {}
        for number, slot in sorted(self.slots.items(), key=lambda item: item[1].serial):
            newest[slot.content.block_hash] = (slot.serial, number, slot.content)
        return [(number, content) for _, number, content in sorted(newest.values())]

    def write(self, copy: Copy, cells: list[int]) -> None:
        self.serial += 1
        self.slots[copy.slot] = Slot(self.serial, copy.content, cells[:])


class Copier:
    """The copies of one start of the manager."""

    def __init__(self, file: TierFile, cells: list[list[int]], random: Random) -> None:
        self._file = file
        self._cells = cells
        self._random = random
        self.under_way: list[tuple[Copy, bool]] = []  # and whether it is a promotion

    def begin(self, effects: Effects) -> None:
        self.under_way += [(copy, False) for copy in effects.demotions]
        self.under_way += [(copy, True) for copy in effects.promotions]

    def step(self) -> list[tuple[Copy, bool, bool]]:
        """Copies that end now: with whether each is a promotion, and good."""
        ended = []
        for copy, promotion in list(self.under_way):
            if self._random.random() < STEP_RATE:
                self.under_way.remove((copy, promotion))
                ended.append((copy, promotion, self._copy(copy, promotion)))
        return ended

    def _copy(self, copy: Copy, promotion: bool) -> bool:
        fails = self._random.random() < FAILURE_RATE
        if promotion:
            slot = self._file.slots.get(copy.slot)
            assert slot is not None
            assert slot.content == copy.content
            self._cells[copy.block][:] = [JUNK] * len(slot.cells) if fails else slot.cells
        elif fails:
            self._file.slots.pop(copy.slot, None)
        else:
            self._file.write(copy, self._cells[copy.block])
        return not fails

    def killed(self) -> None:
        """Each copy under way is not yet begun, half done or just done."""
        for copy, promotion in self.under_way:
            how_far = self._random.randrange(3)
            if promotion and how_far:
                self._cells[copy.block][:] = [JUNK] * len(self._cells[copy.block])
            elif how_far == 1:
                self._file.slots.pop(copy.slot, None)
            elif how_far == 2:
                self._file.write(copy, self._cells[copy.block])
