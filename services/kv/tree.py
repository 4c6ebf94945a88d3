"""The cached prefixes as a tree, without I/O: a node is a run of blocks without a branch.

Everything is a list of numbers over nodes, made once; a listing is the order in which nodes are shown.
Sorting is done in pieces, as one long sort would not let other threads run.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, TypeVar

from services.kv.contents import TOKEN_BYTES, Contents

Sort = Literal["bytes", "tokens", "hits", "age", "references", "recent"]
Order = Literal["desc", "asc"]
SORTS: Final[tuple[Sort, ...]] = ("bytes", "tokens", "hits", "age", "references", "recent")
NO_NODE: Final = -1
Number = TypeVar("Number", int, float)
_PIECE: Final = 4096  # items sorted in one go
_PIECE_BLOCKS: Final = 256  # searched in one go
_MAX_LISTINGS: Final = 8


@dataclass(frozen=True)
class Listing:
    """Which nodes are shown, in which order. `parent`: only what is below this node; `levels`: how deep."""

    sort: Sort = "bytes"
    order: Order = "desc"
    parent: int = NO_NODE
    levels: int = 1 << 30
    query: bytes = b""  # lower case; "" shows all


class Tree:
    """Nodes are numbered so that a parent comes before its children. `subtree_…` include the node itself."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        live = [row for row, blocks in enumerate(contents.blocks) if blocks]
        self._above = [NO_NODE] * len(contents)  # row → row of the block before it
        self._below = [0] * len(contents)  # row → how many rows follow on it
        self._next = [NO_NODE] * len(contents)  # row → one that follows on it
        self._link(live)
        self.node_of = [NO_NODE] * len(contents)  # row → node
        self.first: list[int] = []  # node → row of its first block
        self.last: list[int] = []
        self.parent: list[int] = []  # node → node
        self.depth: list[int] = []
        self.roots: list[int] = []
        self.children: dict[int, list[int]] = {}  # of the nodes that have some
        self._make_nodes(live)
        self.first_token = self._first_tokens()
        self._sum_up()
        self._listings: dict[Listing, list[int]] = {}

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, node: int) -> Iterator[int]:
        """Its blocks, in order."""
        row, last = self.first[node], self.last[node]
        while row != last:
            yield row
            row = self._next[row]
        yield last

    def find(self, block_hash: bytes) -> int:
        """The node that has this block, or NO_NODE."""
        row = self.contents.rows.get(block_hash)
        return NO_NODE if row is None else self.node_of[row]

    # --- making it ----------------------------------------------------------------------------------------

    def _link(self, live: list[int]) -> None:
        rows, parents, blocks = self.contents.rows, self.contents.parents, self.contents.blocks
        for row in live:
            above = rows.get(parents[row], NO_NODE)
            if above != NO_NODE and blocks[above]:
                self._above[row] = above
                self._below[above] += 1
                self._next[above] = row

    def _make_nodes(self, live: list[int]) -> None:
        """From the roots down; the rows that follow on a node's last one begin its children."""
        followers: dict[int, list[int]] = {}
        for row in live:
            above = self._above[row]
            if above != NO_NODE and self._below[above] > 1:
                followers.setdefault(above, []).append(row)
        heads = [(row, NO_NODE) for row in live if self._above[row] == NO_NODE]
        for row, parent in heads:  # which grows
            node = len(self.first)
            self.first.append(row)
            self.parent.append(parent)
            self.depth.append(0 if parent == NO_NODE else self.depth[parent] + 1)
            (self.roots if parent == NO_NODE else self.children.setdefault(parent, [])).append(node)
            self.node_of[row] = node
            while self._below[row] == 1:
                row = self._next[row]
                self.node_of[row] = node
            self.last.append(row)
            heads.extend((follower, node) for follower in followers.get(row, ()))

    def _first_tokens(self) -> list[int]:
        """Node → index of its first token in its text; -1 where what comes before it is gone."""
        contents = self.contents
        found: list[int] = []
        for node, row in enumerate(self.first):
            parent = self.parent[node]
            if parent == NO_NODE:
                known = not contents.root or contents.parents[row] == contents.root
                found.append(0 if known else -1)
            elif found[parent] < 0:
                found.append(-1)
            else:
                length = sum(len(contents.tokens[above]) for above in self.rows(parent))
                found.append(found[parent] + length // TOKEN_BYTES)
        return found

    def _sum_up(self) -> None:
        contents = self.contents
        zeros = [0] * len(self)
        self.blocks, self.tokens, self.hits, self.references = zeros[:], zeros[:], zeros[:], zeros[:]
        self.oldest = [0.0] * len(self)
        self.subtree_recent = [0.0] * len(self)
        for node in range(len(self)):
            rows = list(self.rows(node))
            self.blocks[node] = sum(contents.blocks[row] for row in rows)
            self.tokens[node] = sum(len(contents.tokens[row]) for row in rows) // TOKEN_BYTES
            self.hits[node] = sum(contents.hits[row] for row in rows)
            self.references[node] = max(contents.references[row] for row in rows)
            self.oldest[node] = max(contents.ages[row] for row in rows)
            self.subtree_recent[node] = -min(contents.ages[row] for row in rows)
        self.subtree_blocks = self._upwards(self.blocks, int.__add__)
        self.subtree_tokens = self._upwards(self.tokens, int.__add__)
        self.subtree_hits = self._upwards(self.hits, int.__add__)
        self.subtree_references = self._upwards(self.references, max)
        self.subtree_oldest = self._upwards(self.oldest, max)
        self.subtree_recent = self._upwards(self.subtree_recent, max)

    def _upwards(self, values: list[Number], join: Callable[[Number, Number], Number]) -> list[Number]:
        """Each node's value joined with those of all below it."""
        found = values[:]
        for node in range(len(found) - 1, -1, -1):
            parent = self.parent[node]
            if parent != NO_NODE:
                found[parent] = join(found[parent], found[node])
        return found

    # --- listing it ---------------------------------------------------------------------------------------

    def listed(self, listing: Listing, text: Callable[[bytes], bytes]) -> list[int]:
        """The nodes in order: each before what is below it. `text`: packed tokens → their bytes of text."""
        found = self._listings.get(listing)
        if found is None:
            found = self._list(listing, text)
            if len(self._listings) >= _MAX_LISTINGS:
                del self._listings[next(iter(self._listings))]
            self._listings[listing] = found
        return found

    def matches(self, node: int, query: bytes, text: Callable[[bytes], bytes]) -> bool:
        """Whether `query` ends in this node's text; it may begin in the block before."""
        tokens, keep = self.contents.tokens, max(0, len(query) - 1)
        above = self._above[self.first[node]]
        carried = b"" if above == NO_NODE else text(tokens[above])
        rows = self.rows(node)
        while piece := [tokens[row] for row in islice(rows, _PIECE_BLOCKS)]:
            carried = carried[len(carried) - keep :] if len(carried) > keep else carried
            carried = (carried + text(b"".join(piece))).lower()
            if query in carried:
                return True
        return False

    def _list(self, listing: Listing, text: Callable[[bytes], bytes]) -> list[int]:
        keys = self._keys(listing)
        wanted = self._wanted(listing.query, text) if listing.query else None
        deepest = listing.levels + (0 if listing.parent == NO_NODE else self.depth[listing.parent] + 1)
        below = self.roots if listing.parent == NO_NODE else self.children.get(listing.parent, [])
        found: list[int] = []
        stack = self._sorted(below, keys, wanted)
        while stack:
            node = stack.pop()
            found.append(node)
            if self.depth[node] + 1 < deepest and node in self.children:
                stack += self._sorted(self.children[node], keys, wanted)
        return found

    def _keys(self, listing: Listing) -> list[float]:
        columns: dict[Sort, list[int] | list[float]] = {
            "bytes": self.subtree_blocks,
            "tokens": self.subtree_tokens,
            "hits": self.subtree_hits,
            "age": self.subtree_oldest,
            "references": self.subtree_references,
            "recent": self.subtree_recent,
        }
        sign = 1 if listing.order == "desc" else -1
        return [sign * value for value in columns[listing.sort]]

    def _wanted(self, query: bytes, text: Callable[[bytes], bytes]) -> bytearray:
        """Node → whether it or one below it matches."""
        found = bytearray(len(self))
        for node in range(len(self) - 1, -1, -1):
            if found[node] or self.matches(node, query, text):
                found[node] = 1
                if self.parent[node] != NO_NODE:
                    found[self.parent[node]] = 1
        return found

    def _sorted(self, nodes: list[int], keys: list[float], wanted: bytearray | None) -> list[int]:
        """Smallest key first: what is to be shown first is popped last-in. Equal ones by hash."""
        hashes, last = self.contents.hashes, self.last
        shown = nodes if wanted is None else [node for node in nodes if wanted[node]]

        def key(node: int) -> tuple[float, bytes]:
            return keys[node], hashes[last[node]]

        if len(shown) <= _PIECE:
            return sorted(shown, key=key)
        pieces = [sorted(shown[at : at + _PIECE], key=key) for at in range(0, len(shown), _PIECE)]
        return list(heapq.merge(*pieces, key=key))


def page_after(tree: Tree, nodes: list[int], ordinal: int, block_hash: bytes) -> int:
    """Where the page begins after the node that had `block_hash` and was shown as number `ordinal`: behind
    that node, or, if it is gone, where it was.
    """
    node = tree.find(block_hash)
    try:
        return nodes.index(node) + 1 if node != NO_NODE else min(ordinal, len(nodes))
    except ValueError:
        return min(ordinal, len(nodes))


def leading(rows: Iterable[int], tokens: list[bytes], enough: int) -> bytes:
    """The first tokens of a node, packed: whole blocks until there are `enough`."""
    parts: list[bytes] = []
    size = 0
    for row in rows:
        parts.append(tokens[row])
        size += len(tokens[row]) // TOKEN_BYTES
        if size >= enough:
            break
    return b"".join(parts)
