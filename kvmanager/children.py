"""Children: which sealed blocks follow a given parent, and which of them begins most like a text.

    key = parent_hash ‖ salt       (a first block's parent, the root, is the same under every salt)

A parent's children lie in the order of their packed tokens. Those that begin like a text then lie next to
the place where the text would be, however many there are.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from kvmanager.hashing import TOKEN_BYTES

_LAST = 1 << 62  # sorts after every block


class Children:
    """Every sealed or cached block is here exactly once, full or partial."""

    __slots__ = ("_siblings",)

    def __init__(self) -> None:
        self._siblings: dict[bytes, list[tuple[bytes, int]]] = {}

    def add(self, key: bytes, tokens: bytes, block: int) -> bool:
        """True if `block` has siblings."""
        siblings = self._siblings.get(key)
        if siblings is None:
            self._siblings[key] = [(tokens, block)]
            return False
        insort(siblings, (tokens, block))
        return True

    def remove(self, key: bytes, tokens: bytes, block: int) -> None:
        siblings = self._siblings[key]
        place = bisect_left(siblings, (tokens, block))
        assert siblings[place] == (tokens, block), f"block {block} is not among its parent's children"
        if len(siblings) == 1:
            del self._siblings[key]
        else:
            del siblings[place]

    def most_alike(self, key: bytes, tokens: bytes) -> tuple[int, int]:
        """The child that begins with the most of `tokens`, and how many those are: 0 if none does."""
        siblings = self._siblings.get(key)
        if siblings is None:
            return 0, 0
        place = bisect_left(siblings, (tokens,))
        found, most = 0, 0
        for there, block in siblings[max(place - 1, 0) : place + 1]:
            shared = num_shared(there, tokens)
            if shared > most:
                found, most = block, shared
        return found, most

    def is_covered(self, key: bytes, tokens: bytes, block: int) -> bool:
        """Whether a sibling begins with all tokens of `block`, and so serves whoever could use it.

        Of two with equal tokens the one with the larger number is covered.
        """
        siblings = self._siblings[key]
        if siblings[bisect_left(siblings, (tokens,))] != (tokens, block):
            return True
        after = bisect_right(siblings, (tokens, _LAST))
        return after < len(siblings) and siblings[after][0].startswith(tokens)

    def beginnings(self, key: bytes, tokens: bytes) -> Iterator[int]:
        """Children whose tokens `tokens` goes on from, but for those that lay covered before."""
        siblings = self._siblings[key]
        place = bisect_left(siblings, (tokens,))
        while place and tokens.startswith(siblings[place - 1][0]):
            place -= 1
            yield siblings[place][1]

    def entries(self) -> dict[int, tuple[bytes, bytes]]:
        """Block → key and tokens (a copy, for audits)."""
        return {
            block: (key, tokens) for key, siblings in self._siblings.items() for tokens, block in siblings
        }


def num_shared(one: bytes, other: bytes) -> int:
    """With how many equal tokens two packed texts begin."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
