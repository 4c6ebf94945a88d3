"""Children: which sealed blocks follow a given parent, and which of them begins most like a text.

    key = parent_hash ‖ salt       (a first block's parent, the root, is the same under every salt)

Most parents have one child; more lie in the order of their packed tokens. Those that begin like a text then
lie next to the place where the text would be, however many there are.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from kvmanager.pool.hashing import TOKEN_BYTES, Held

MANY = -1
TOKENS = 3  # which of a block's contents those are
_LAST = 1 << 62  # sorts after every block


class Children:
    """Every sealed or cached block is here exactly once, full or partial.

    `only` may be used directly for a parent's only child: that is the common case, and it has to be fast. It
    has MANY for a parent with more.
    """

    __slots__ = ("_contents", "_siblings", "only")

    def __init__(self, contents: Sequence[Held]) -> None:
        """`contents`: what each block holds, kept by someone else."""
        self._contents = contents
        self.only: dict[bytes, int] = {}
        self._siblings: dict[bytes, list[tuple[bytes, int]]] = {}

    def add(self, key: bytes, block: int) -> bool:
        """True if `block` has siblings."""
        first = self.only.setdefault(key, block)
        if first == block:
            return False
        if first != MANY:
            self.only[key] = MANY
            self._siblings[key] = [(self._contents[first][TOKENS], first)]
        insort(self._siblings[key], (self._contents[block][TOKENS], block))
        return True

    def remove(self, key: bytes, block: int) -> None:
        if self.only[key] == block:
            del self.only[key]
            return
        siblings, entry = self._siblings[key], (self._contents[block][TOKENS], block)
        place = bisect_left(siblings, entry)
        assert siblings[place] == entry, f"block {block} is not among its parent's children"
        del siblings[place]
        if len(siblings) == 1:
            self.only[key] = siblings[0][1]
            del self._siblings[key]

    def of(self, key: bytes) -> list[tuple[bytes, int]]:
        """Tokens and number of each child, in order."""
        block = self.only.get(key)
        if block is None:
            return []
        return self._siblings[key] if block == MANY else [(self._contents[block][TOKENS], block)]

    def most_alike(self, key: bytes, tokens: bytes) -> tuple[int, int]:
        """The child that begins with the most of `tokens`, and how many those are: 0 if none does."""
        siblings = self.of(key)
        if not siblings:
            return 0, 0
        place = bisect_left(siblings, (tokens,))
        found, most = 0, 0
        for there, block in siblings[max(place - 1, 0) : place + 1]:
            shared = num_shared(there, tokens)
            if shared > most:
                found, most = block, shared
        return found, most

    def nearest(self, key: bytes, tokens: bytes) -> int | None:
        """The child that `most_alike` finds; where none shares anything, one that is next in order."""
        siblings = self.of(key)
        if not siblings:
            return None
        found, most = self.most_alike(key, tokens)
        return found if most else siblings[min(bisect_left(siblings, (tokens,)), len(siblings) - 1)][1]

    def is_covered(self, key: bytes, block: int) -> bool:
        """Whether a sibling begins with all tokens of `block`, and so serves whoever could use it.

        Of two with equal tokens the one with the larger number is covered.
        """
        siblings, tokens = self.of(key), self._contents[block][TOKENS]
        if siblings[bisect_left(siblings, (tokens,))] != (tokens, block):
            return True
        after = bisect_right(siblings, (tokens, _LAST))
        return after < len(siblings) and siblings[after][0].startswith(tokens)

    def beginnings(self, key: bytes, tokens: bytes) -> Iterator[int]:
        """Children whose tokens `tokens` goes on from, but for those that lay covered before."""
        siblings = self.of(key)
        place = bisect_left(siblings, (tokens,))
        while place and tokens.startswith(siblings[place - 1][0]):
            place -= 1
            yield siblings[place][1]

    @property
    def num_blocks(self) -> int:
        """How many are here."""
        return len(self.only) - len(self._siblings) + sum(map(len, self._siblings.values()))

    def has(self, key: bytes, block: int) -> bool:
        """Whether the block is here under that key."""
        siblings, entry = self.of(key), (self._contents[block][TOKENS], block)
        place = bisect_left(siblings, entry)
        return place < len(siblings) and siblings[place] == entry

    def entries(self) -> dict[int, tuple[bytes, bytes]]:
        """Block → key and tokens (a copy, for audits)."""
        return {block: (key, tokens) for key in self.only for tokens, block in self.of(key)}


def num_shared(one: bytes, other: bytes) -> int:
    """With how many equal tokens two packed texts begin."""
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0  # as of most that are compared: what follows takes longer
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
