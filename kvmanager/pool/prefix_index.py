"""Prefix index: block hash → block. Several blocks may hold the same content; one of them is primary and is
found.
"""


class PrefixIndex:
    """Every sealed or cached block is here exactly once, as primary or as copy.

    `primary` may be used directly for the only block with its content, one that has no `copies`: that is the
    common case, and it has to be fast.
    """

    __slots__ = ("copies", "primary")

    def __init__(self) -> None:
        self.primary: dict[bytes, int] = {}
        self.copies: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Distinct contents."""
        return len(self.primary)

    def find(self, block_hash: bytes) -> int | None:
        """The primary block with this content, or None."""
        return self.primary.get(block_hash)

    def add(self, block_hash: bytes, block: int) -> bool:
        """True if this content was not found before."""
        if self.primary.setdefault(block_hash, block) == block:
            return True
        self.copies.setdefault(block_hash, []).append(block)
        return False

    def remove(self, block_hash: bytes, block: int) -> bool:
        """Forget `block`; a copy takes a primary's place. True if the content can no longer be found."""
        copies = self.copies.get(block_hash)
        if copies is None:
            found = self.primary.pop(block_hash)
            assert found == block, f"block {block} is not in the index under its hash"
            return True
        if self.primary[block_hash] == block:
            self.primary[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self.copies[block_hash]
        return False

    @property
    def num_blocks(self) -> int:
        """Primary ones and copies."""
        return len(self.primary) + sum(map(len, self.copies.values()))

    def blocks(self, block_hash: bytes) -> tuple[int, ...]:
        """All with this content, the primary first."""
        block = self.primary.get(block_hash)
        return () if block is None else (block, *self.copies.get(block_hash, ()))

    def entries(self) -> dict[bytes, list[int]]:
        """All blocks by hash, the primary first (a copy, for audits)."""
        return {key: [block, *self.copies.get(key, ())] for key, block in self.primary.items()}
