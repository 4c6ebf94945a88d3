"""The small world with a disk tier below the pool: copies stay under way until they are ended, well or not,
and are cut short when the manager dies.
"""

from typing import Any

from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import Content
from kvmanager.state import Effects, Policy
from kvmanager.tier.tiers import Copy, Tier
from tests.kvmanager.fake_clients import BLOCK_SIZE, Process
from tests.kvmanager.world import World

Slot = tuple[Content, list[Any], tuple[str, tuple[int, ...]]]
"""What the block is, its cells, and what the naive model knows of it."""


class TierWorld(World):
    """`slots` is the tier's file: only good ones, as checksums tell the others."""

    def __init__(self, num_blocks: int, num_slots: int, resume: str) -> None:
        self.num_slots = num_slots
        self.slots: dict[int, Slot] = {}
        self.copies: list[tuple[Copy, bool]] = []  # under way; whether it is a promotion
        self.knowledge: dict[int, tuple[str, tuple[int, ...]]] = {}  # slot that is written → of what
        self.finishing = False
        super().__init__(num_blocks, Policy(6, 0.05, 1e9, 100.0, resume, pin_budget=0.4))

    @property
    def tier(self) -> Tier:
        assert self.core.state.tiering is not None
        return self.core.state.tiering.tier

    def boot(self, pool: BlockPool, quarantines: Any, survivors: tuple[str, ...]) -> None:
        """What the file holds is known again; of equal contents only one."""
        self.boots += 1
        self.copies = []
        self.core = Core(f"boot-{self.boots}", "/pool", self.policy, self.now)
        kept = {slot[0].block_hash: (number, slot[0]) for number, slot in self.slots.items()}
        self.core.attach(pool, quarantines, survivors, Tier(self.num_slots, kept.values()))
        self.faults: list[str] = []
        self.core.on_fault = self.faults.append

    def cut_short(self, how_far: int) -> None:
        """The manager dies: its copies are not begun (0), half done (1) or just done (2)."""
        for copy, promotion in self.copies:
            if promotion and how_far:
                self.cells[copy.block][:] = ["torn"] * BLOCK_SIZE
            elif how_far == 1:
                self.slots.pop(copy.slot, None)
            elif how_far == 2:
                self.slots[copy.slot] = self.copied_down(copy)
        self.restart()

    def carry_out(self, effects: Effects) -> None:
        super().carry_out(effects)
        for slot in effects.erasures:
            self.slots.pop(slot, None)
        self.knowledge.update((copy.slot, self.content[copy.block]) for copy in effects.demotions)
        for copy in effects.promotions:
            self.content.pop(copy.block, None)
        self.copies += [(copy, False) for copy in effects.demotions]
        self.copies += [(copy, True) for copy in effects.promotions]

    def deliver(self, process: Process, message: Any) -> bool:
        delivered = super().deliver(process, message)
        while self.finishing and self.copies:
            self.end_copy(0, True)
        return delivered

    def copied_down(self, copy: Copy) -> Slot:
        return copy.content, self.cells[copy.block][:], self.knowledge[copy.slot]

    def end_copy(self, index: int, good: bool) -> None:
        copy, promotion = self.copies.pop(index % len(self.copies))
        if not promotion and good:
            self.slots[copy.slot] = self.copied_down(copy)
        elif not promotion:
            self.slots.pop(copy.slot, None)
        elif good:
            content, cells, known = self.slots[copy.slot]
            assert content == copy.content
            self.cells[copy.block][:] = cells
            self.content[copy.block] = known
        else:
            self.cells[copy.block][:] = ["torn"] * BLOCK_SIZE
        self.carry_out(self.core.copied(self.tick(), copy, promotion, good, 0.001))
        self.forget()

    def check(self) -> None:
        super().check()
        for number, content in self.tier.contents():
            assert self.slots[number][0] == content, f"slot {number}"

    def finish(self, max_rounds: int = 300) -> None:
        self.finishing = True
        super().finish(max_rounds)
