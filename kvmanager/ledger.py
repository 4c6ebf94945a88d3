"""Ledger: who holds which block, and so why it is not free."""

from collections.abc import Iterator


class Holder:
    """Someone who keeps blocks in use. `owner_tag` names in their records the process that writes them."""

    __slots__ = ("owner_tag",)

    def __init__(self, owner_tag: bytes) -> None:
        self.owner_tag = owner_tag

    def describe(self) -> str:
        """Who this is, for people."""
        raise NotImplementedError


class Ledger:
    """Block → its holders, each at most once."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: dict[int, set[Holder]] = {}

    def add(self, block: int, holder: Holder) -> None:
        holders = self._holders.get(block)
        if holders is None:
            self._holders[block] = {holder}
        else:
            assert holder not in holders, f"{holder.describe()} already holds block {block}"
            holders.add(holder)

    def remove(self, block: int, holder: Holder) -> None:
        holders = self._holders.get(block, set())
        assert holder in holders, f"{holder.describe()} does not hold block {block}"
        holders.remove(holder)
        if not holders:
            del self._holders[block]

    def replace(self, block: int, holder: Holder, successor: Holder) -> None:
        """`successor` holds `block` instead of `holder`."""
        holders = self._holders[block]
        assert successor not in holders, f"{successor.describe()} already holds block {block}"
        holders.remove(holder)
        holders.add(successor)

    def holders(self, block: int) -> tuple[Holder, ...]:
        return tuple(self._holders.get(block, ()))

    def holds(self, block: int, holder: Holder) -> bool:
        return holder in self._holders.get(block, ())

    def items(self) -> Iterator[tuple[int, tuple[Holder, ...]]]:
        """Every held block with its holders, for audits."""
        for block, holders in self._holders.items():
            yield block, tuple(holders)
