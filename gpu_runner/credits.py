"""Block credits: free blocks granted ahead, so that decoding never waits for an answer of the manager."""

from collections import deque
from collections.abc import Mapping

from kvmanager.protocol import BlockRef


class Credits:
    """Blocks in hand, used in the order in which they came."""

    def __init__(self) -> None:
        self._blocks: deque[BlockRef] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def grant(self, blocks: tuple[BlockRef, ...]) -> None:
        self._blocks.extend(blocks)

    def take(self) -> BlockRef | None:
        """A block to write, or None when there is none in hand."""
        return self._blocks.popleft() if self._blocks else None

    def give_back(self, wanted: int) -> tuple[BlockRef, ...]:
        """The blocks held beyond `wanted`, no longer held."""
        return tuple(self._blocks.pop() for _ in range(len(self._blocks) - wanted))


def look_ahead(needs: Mapping[int, int]) -> int:
    """Blocks needed at the next two steps at which any are; `needs` maps steps from now to blocks.

    The answer stays the same over steps at which none are needed: all distances fall together. So such a step
    tells the manager nothing, and the blocks of the second step are asked for one whole crossing ahead.
    """
    return sum(needs[distance] for distance in sorted(needs)[:2])
