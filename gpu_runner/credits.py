"""Block credits: free blocks granted ahead, so that decoding never waits for an answer of the manager."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from kvmanager.protocol import BlockRef


class Credits:
    """Blocks in hand, used in the order in which they came."""

    def __init__(self) -> None:
        self._blocks: deque[BlockRef] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockRef]:
        return iter(self._blocks)

    def grant(self, blocks: Iterable[BlockRef]) -> None:
        self._blocks.extend(blocks)

    def take(self) -> BlockRef | None:
        """A block to write, or None when there is none in hand."""
        return self._blocks.popleft() if self._blocks else None

    def give_back(self, wanted: int) -> tuple[BlockRef, ...]:
        """The blocks held beyond `wanted`, no longer held."""
        return tuple(self._blocks.pop() for _ in range(len(self._blocks) - wanted))


def look_ahead(needs: Mapping[int, int]) -> int:
    """Blocks needed at the next step at which any are; `needs` maps steps after the planned one to blocks.

    They are asked for before the step that is planned now is computed, at the latest, so there is that step's
    time for the answer. More would be held without a use: a hundredth of the memory with many sequences, of
    which some need a block at every step. The answer stays the same over steps at which none are needed, as
    all distances fall together: such a step tells the manager nothing.
    """
    return needs[min(needs)] if needs else 0
