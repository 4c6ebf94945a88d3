"""Partly filled blocks shared since a fork: each sharer copies before its first write, but the last."""


class SharedTails:
    """How many sequences share a tail. Only blocks with two or more are kept; full ones are never written."""

    def __init__(self) -> None:
        self._sharers: dict[int, int] = {}

    @property
    def num_copies_due(self) -> int:
        """Blocks that it takes until no tail is shared: one per sharer but the last, who writes in place."""
        return sum(self._sharers.values()) - len(self._sharers)

    def share(self, block_id: int, num_children: int) -> None:
        """`num_children` more sequences hold the block."""
        if num_children:
            self._sharers[block_id] = self._sharers.get(block_id, 1) + num_children

    def is_shared(self, block_id: int) -> bool:
        return block_id in self._sharers

    def leave(self, block_id: int) -> None:
        """One sequence less; for a block that is not shared this means nothing."""
        sharers = self._sharers.get(block_id, 0)
        if sharers > 2:
            self._sharers[block_id] = sharers - 1
        else:
            self._sharers.pop(block_id, None)
