"""A queue of blocks with removal from the middle: first in, first out, every operation in constant time.

A linked list over block ids in two arrays, with one more entry as its head. The pool has two: blocks that
are free, and cached blocks in the order in which they will be evicted.
"""

from collections.abc import Iterator, Sequence

_ABSENT = -1


class FreeQueue:
    """Blocks 0 .. num_blocks - 1, each at most once. `length` is how many, for those who ask often."""

    __slots__ = ("_head", "_next", "_previous", "length")

    def __init__(self, num_blocks: int) -> None:
        self._head = num_blocks
        self._next = [_ABSENT] * num_blocks + [num_blocks]
        self._previous = [_ABSENT] * num_blocks + [num_blocks]
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """First to last; do not change the queue meanwhile."""
        block = self._next[self._head]
        while block != self._head:
            yield block
            block = self._next[block]

    @property
    def first(self) -> int:
        """The block that `pop` would take; the queue must not be empty."""
        assert self.length, "the queue is empty"
        return self._next[self._head]

    def append(self, block: int) -> None:
        """Add `block` as the last; it must not be in the queue."""
        self.extend((block,))

    def extend(self, blocks: Sequence[int]) -> None:
        """Add these in their order, the last of them as the last; none may be in the queue."""
        following, preceding, last = self._next, self._previous, self._previous[self._head]
        for block in blocks:
            assert following[block] == _ABSENT, f"block {block} is already in the queue"
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = self._head
        preceding[self._head] = last
        self.length += len(blocks)

    def prepend(self, block: int) -> None:
        """Add `block` as the first; it must not be in the queue."""
        assert self._next[block] == _ABSENT, f"block {block} is already in the queue"
        first = self._next[self._head]
        self._next[self._head] = block
        self._previous[block] = self._head
        self._next[block] = first
        self._previous[first] = block
        self.length += 1

    def remove(self, block: int) -> None:
        """Take `block` out; it must be in the queue."""
        following = self._next[block]
        assert following != _ABSENT, f"block {block} is not in the queue"
        preceding = self._previous[block]
        self._next[preceding] = following
        self._previous[following] = preceding
        self._next[block] = _ABSENT
        self.length -= 1

    def pop(self) -> int:
        """Take out the first; the queue must not be empty."""
        return self.pop_all(1)[0]

    def pop_all(self, count: int) -> list[int]:
        """Take out the first so many, in order; the queue must have them."""
        if not count:
            return []
        assert count <= self.length, "the queue is empty"
        following, popped = self._next, []
        block = following[self._head]
        for _ in range(count):
            popped.append(block)
            after = following[block]
            following[block] = _ABSENT
            block = after
        following[self._head] = block
        self._previous[block] = self._head
        self.length -= count
        return popped
