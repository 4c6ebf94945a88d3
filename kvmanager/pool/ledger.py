"""Ledger: who holds which block, and so why it is not free."""

from collections.abc import Iterable, Iterator


class Holder:
    """Someone who keeps blocks in use. `owner_tag` names in their records the process that writes them."""

    __slots__ = ("owner_tag",)

    def __init__(self, owner_tag: bytes) -> None:
        self.owner_tag = owner_tag

    def describe(self) -> str:
        """Who this is, for people."""
        raise NotImplementedError


class Ledger:
    """Block → its holders, each at most once. Most blocks have one, so a tuple is all it takes.

    `by_block` may be used directly for a block with one holder: that is the common case, and it has to be
    fast.
    """

    __slots__ = ("by_block",)

    def __init__(self, num_blocks: int) -> None:
        self.by_block: list[tuple[Holder, ...]] = [()] * num_blocks

    def add(self, block: int, holder: Holder) -> None:
        holders = self.by_block[block]
        if not holders:
            self.by_block[block] = (holder,)
            return
        assert holder not in holders, f"{holder.describe()} already holds block {block}"
        self.by_block[block] = (*holders, holder)

    def remove(self, block: int, holder: Holder) -> bool:
        """True if that was the last one."""
        holders = self.by_block[block]
        try:
            place = holders.index(holder)
        except ValueError:
            raise AssertionError(f"{holder.describe()} does not hold block {block}") from None
        self.by_block[block] = left = holders[:place] + holders[place + 1 :]
        return not left

    def replace(self, block: int, holder: Holder, successor: Holder) -> None:
        """`successor` holds `block` instead of `holder`."""
        if self.by_block[block] == (holder,):
            self.by_block[block] = (successor,)
            return
        self.remove(block, holder)
        self.add(block, successor)

    def holders(self, block: int) -> tuple[Holder, ...]:
        return self.by_block[block]

    def ref_counts(self, first: int, end: int) -> bytearray:
        """Of blocks `first` to `end`, each at most 255."""
        counts = map(len, self.by_block[first:end])
        try:
            return bytearray(counts)
        except ValueError:  # one of them is larger
            return bytearray([min(len(holders), 255) for holders in self.by_block[first:end]])

    def counts_of(self, blocks: Iterable[int]) -> Iterator[int]:
        """Holders of each of these."""
        return map(len, map(self.by_block.__getitem__, blocks))

    def ref_count(self, block: int) -> int:
        return len(self.by_block[block])
