"""What the findable blocks hold, against what their hashes say."""

from array import array

from kvmanager.block_pool import BlockPool
from tests.sim.model import chain


class Contents:
    """Knows for every hash that was ever sealed what its block's cells must be."""

    def __init__(self, cells: list[list[int]]) -> None:
        self._cells = cells
        self._right: dict[bytes, list[int]] = {}

    def check(self, pool: BlockPool, blocks: set[int]) -> None:
        """No findable block among `blocks` holds other tokens than those of its hash's whole chain."""
        for block in sorted(blocks):
            if pool.block_hash[block]:
                right = self._of(pool, pool.block_hash[block], block)
                assert self._cells[block] == right, f"block {block} is findable and holds other tokens"

    def _of(self, pool: BlockPool, digest: bytes, block: int) -> list[int]:
        known = self._right.get(digest)
        if known is None:
            parent = pool.parent_hash[block]
            before = 0
            if parent != pool.root:
                above = pool.index.find(parent)
                assert above is not None or parent in self._right, f"block {block} was sealed under no parent"
                before = (self._right[parent] if above is None else self._of(pool, parent, above))[-1]
            known = self._right[digest] = chain(array("I", pool.tokens[block]), before)
        return known
