"""Ledger: who holds which block, and so why it is not free."""


class Holder:
    """Someone who keeps blocks in use. `owner_tag` names in their records the process that writes them."""

    __slots__ = ("owner_tag",)

    def __init__(self, owner_tag: bytes) -> None:
        self.owner_tag = owner_tag

    def describe(self) -> str:
        """Who this is, for people."""
        raise NotImplementedError


class Ledger:
    """Block → its holders, each at most once. Most blocks have one, so a tuple is all it takes."""

    __slots__ = ("_holders",)

    def __init__(self, num_blocks: int) -> None:
        self._holders: list[tuple[Holder, ...]] = [()] * num_blocks

    def add(self, block: int, holder: Holder) -> None:
        holders = self._holders[block]
        if not holders:
            self._holders[block] = (holder,)
            return
        assert holder not in holders, f"{holder.describe()} already holds block {block}"
        self._holders[block] = (*holders, holder)

    def remove(self, block: int, holder: Holder) -> bool:
        """True if that was the last one."""
        holders = self._holders[block]
        if holders == (holder,):
            self._holders[block] = ()
            return True
        assert holder in holders, f"{holder.describe()} does not hold block {block}"
        place = holders.index(holder)
        self._holders[block] = holders[:place] + holders[place + 1 :]
        return False

    def replace(self, block: int, holder: Holder, successor: Holder) -> None:
        """`successor` holds `block` instead of `holder`."""
        if self._holders[block] == (holder,):
            self._holders[block] = (successor,)
            return
        self.remove(block, holder)
        self.add(block, successor)

    def holders(self, block: int) -> tuple[Holder, ...]:
        return self._holders[block]

    def ref_count(self, block: int) -> int:
        return len(self._holders[block])
