"""The findable contents of the pool, in columns: no object per block, so that 100,000 of them neither take
much memory nor hold up the garbage collector.
"""

from collections.abc import Sequence
from typing import Final

from kvmanager.protocol import FLAG_IN_TIER, BlocksPage, CacheEvent

FINDABLE: Final = frozenset((2, 3))  # SEALED, CACHED in `BlocksPage.states`
TOKEN_BYTES: Final = 4


class Contents:
    """One row per content, found by its hash in `rows`. Those of which no block is left have `blocks` 0; they
    may be in the tier (FLAG_IN_TIER).

    `root` is the parent of every first block; empty if it is not known. `order`: rows as they are shown.
    """

    def __init__(self, num_blocks: int, block_size: int, block_bytes: int, root: bytes) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.root = root
        self.rows: dict[bytes, int] = {}
        self.hashes: list[bytes] = []
        self.parents: list[bytes] = []
        self.tokens: list[bytes] = []  # packed, TOKEN_BYTES each, little-endian
        self.salts: list[bytes] = []
        self.block: list[int] = []  # one of those that hold it
        self.blocks: list[int] = []  # how many do
        self.flags: list[int] = []
        self.references: list[int] = []
        self.hits: list[int] = []
        self.ages: list[float] = []  # of the oldest, seconds
        self.order: Sequence[int] | None = None  # None: as they are

    def __len__(self) -> int:
        return len(self.hashes)

    def shown(self) -> Sequence[int]:
        """Every row, in the order to show."""
        return range(len(self)) if self.order is None else self.order

    def add(self, page: BlocksPage) -> None:
        """Take what is findable in a page with content."""
        for index, state in enumerate(page.states):
            block_hash = page.hashes[index]
            if state not in FINDABLE or not block_hash:
                continue
            row = self.rows.get(block_hash)
            if row is None:
                row = self._new(block_hash, page.parents[index], page.tokens[index], page.salts[index])
                self.block[row] = page.first + index
            self.blocks[row] += 1
            self.flags[row] |= page.flags[index]
            self.references[row] += page.ref_counts[index]
            self.hits[row] += page.hits[index]
            self.ages[row] = max(self.ages[row], page.ages[index])

    def add_tier(self, page: BlocksPage) -> None:
        """Take what is in a page of the tier's slots."""
        for index, block_hash in enumerate(page.hashes):
            if block_hash:
                row = self.rows.get(block_hash)
                if row is None:
                    row = self._new(block_hash, page.parents[index], page.tokens[index], page.salts[index])
                self.flags[row] |= FLAG_IN_TIER

    def apply(self, event: CacheEvent) -> None:
        """An event on what was read, which may be of before it or after."""
        row = self.rows.get(event.block_hash)
        if event.kind == "cleared":
            self.blocks = [0] * len(self)
            self.flags = [flags & ~FLAG_IN_TIER for flags in self.flags]
            return
        if event.kind == "stored" and row is None:
            row = self._new(event.block_hash, event.parent_hash, event.tokens, event.salt)
        if row is None:
            return
        if event.tier == "disk":
            stored = FLAG_IN_TIER if event.kind == "stored" else 0
            self.flags[row] = (self.flags[row] & ~FLAG_IN_TIER) | stored
        elif event.kind == "stored":
            self.block[row] = event.block
            self.blocks[row] = max(1, self.blocks[row])
        else:
            self.blocks[row] = 0

    def _new(self, block_hash: bytes, parent: bytes, tokens: bytes, salt: bytes) -> int:
        row = self.rows[block_hash] = len(self.hashes)
        self.hashes.append(block_hash)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.salts.append(salt)
        for column in (self.block, self.blocks, self.flags, self.references, self.hits):
            column.append(0)
        self.ages.append(0.0)
        return row
