"""The tree of cached prefixes against a naive one, over random caches; and collections that are read while
the cache changes.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.protocol import BlocksQuery
from services.errors import ApiError
from services.kv.collect import Collection, Collector, merge
from services.kv.contents import Contents
from services.kv.pages import prefixes_page, read_cursor
from services.kv.tree import NO_NODE, SORTS, Listing, Tree
from tests.services.fake_cache import BLOCK_BYTES, BLOCK_SIZE, ROOT, Block, FakeCache

TOKENIZER: Any = SimpleNamespace(token_bytes=lambda token: b"<%d>" % token)

texts = st.lists(
    st.lists(st.integers(0, 2), max_size=5).flatmap(
        lambda blocks: st.integers(0, BLOCK_SIZE - 1).map(
            lambda tail: [token for block in blocks for token in [block] * BLOCK_SIZE] + [7] * tail
        )
    ),
    max_size=8,
)
holes = st.sets(st.integers(0, 30), max_size=4)


def cache_of(stored: list[list[int]], removed: set[int], seed: int = 0) -> FakeCache:
    """Some of its blocks are gone, and some are there twice; all have hits, ages and holders."""
    cache, dice = FakeCache(120), random.Random(seed)
    for tokens in stored:
        cache.store(tokens, cache_salt="s" if dice.random() < 0.2 else "")
    for number in removed:
        if cache.blocks[number] is not None:
            cache.remove(number)
    for number, block in enumerate(cache.blocks[:100]):
        if block is not None:
            cache.change(number, hits=dice.randrange(9), age=dice.random() * 99, ref_count=dice.randrange(3))
            if dice.random() < 0.2:
                cache.blocks[100 + cache.blocks[100:].index(None)] = replace(block, hits=1)
    return cache


def contents_of(cache: FakeCache) -> Contents:
    contents = Contents(len(cache.blocks), BLOCK_SIZE, BLOCK_BYTES, ROOT)
    for first in range(0, len(cache.blocks), 7):
        contents.add(cache.answer(BlocksQuery(0, first, 7, content=True)))  # type: ignore[arg-type]
    return contents


@given(texts, holes, st.integers(0, 99))
def test_every_block_is_in_one_node_and_sums_are_right(
    stored: list[list[int]], removed: set[int], seed: int
) -> None:
    cache = cache_of(stored, removed, seed)
    tree = Tree(contents_of(cache))
    contents = tree.contents
    unique = {block.hash: block for block in cache.blocks if block is not None}
    rows = [row for node in range(len(tree)) for row in tree.rows(node)]
    assert sorted(contents.hashes[row] for row in rows) == sorted(unique)
    assert len(rows) == len({*rows})
    everything = [block for block in cache.blocks if block is not None]
    assert sum(tree.subtree_blocks[root] for root in tree.roots) == len(everything)
    assert sum(tree.subtree_tokens[root] for root in tree.roots) == sum(
        len(b.tokens) for b in unique.values()
    )
    assert sum(tree.subtree_hits[root] for root in tree.roots) == sum(b.hits for b in everything)

    def below(key: bytes) -> list[bytes]:
        return [key, *(k for b in unique.values() if b.parent == key for k in below(b.hash))]

    for node in range(len(tree)):
        first, last = contents.hashes[tree.first[node]], contents.hashes[tree.last[node]]
        followers = [b.hash for b in unique.values() if b.parent == last]
        assert len(followers) != 1  # or it would go on
        assert tree.children.get(node, []) == [tree.find(key) for key in followers] or set(
            tree.children[node]
        ) == {tree.find(key) for key in followers}
        all_below = below(first)
        assert tree.subtree_blocks[node] == sum(b.hash in all_below for b in everything)
        assert tree.subtree_hits[node] == sum(b.hits for b in everything if b.hash in all_below)
        assert tree.first_token[node] == first_token(unique, unique[first])
        assert len({contents.salts[row] for row in tree.rows(node)}) == 1


def first_token(unique: dict[bytes, Block], block: Block) -> int:
    if block.parent == ROOT:
        return 0
    parent = unique.get(block.parent)
    before = -1 if parent is None else first_token(unique, parent)
    return -1 if parent is None or before < 0 else before + len(parent.tokens)


listings = st.builds(
    lambda sort, order, levels, query: Listing(sort, order, NO_NODE, levels, query),
    st.sampled_from(SORTS),
    st.sampled_from(["asc", "desc"]),
    st.sampled_from([1, 2, 1 << 20]),
    st.sampled_from([b"", b"<1>", b"<0><2>", b"<7>", b"nothing"]),
)


@given(texts, holes, listings, st.integers(1, 5), st.integers(0, 99))
def test_cursors_visit_every_node_once_each_after_its_parent(
    stored: list[list[int]], removed: set[int], listing: Listing, limit: int, seed: int
) -> None:
    cache = cache_of(stored, removed, seed)
    tree = Tree(contents_of(cache))
    collection = Collection(cache.at, tree.contents, 0.0, tree)
    whole = prefixes_page(collection, tree, listing, (0, b""), 1000, TOKENIZER)
    assert whole.next_cursor is None
    assert whole.total == len(whole.nodes)
    seen, cursor = [], (0, b"")
    while True:
        page = prefixes_page(collection, tree, listing, cursor, limit, TOKENIZER)
        assert len(page.nodes) <= limit
        seen += page.nodes
        if page.next_cursor is None:
            break
        cursor = read_cursor(page.next_cursor)
    assert seen == whole.nodes
    if not listing.query:
        assert len(seen) == sum(depth < listing.levels for depth in tree.depth)
    shown: set[bytes] = set()
    for card in seen:
        node = tree.find(bytes.fromhex(card.hash))
        parent = tree.parent[node]
        assert parent == NO_NODE or tree.contents.hashes[tree.last[parent]] in shown
        shown.add(bytes.fromhex(card.hash))
    for parent in {tree.parent[tree.find(key)] for key in shown}:
        siblings = [c for c in seen if tree.parent[tree.find(bytes.fromhex(c.hash))] == parent]
        values = [c.subtree.bytes for c in siblings]
        if listing.sort == "bytes":
            assert values == sorted(values, reverse=listing.order == "desc")


@given(texts, holes, st.sampled_from([b"<1>", b"<0><2>", b"<7>", b"<7><7>"]))
def test_a_search_shows_what_matches_and_the_way_to_it(
    stored: list[list[int]], removed: set[int], query: bytes
) -> None:
    tree = Tree(contents_of(cache_of(stored, removed)))
    text = lambda tokens: b"".join(b"<%d>" % t for t in memoryview(tokens).cast("I"))  # noqa: E731

    def has(node: int) -> bool:
        return tree.matches(node, query, text) or any(has(child) for child in tree.children.get(node, []))

    shown = tree.listed(Listing(query=query), text)
    assert sorted(shown) == [node for node in range(len(tree)) if has(node)]
    naive = [n for n in range(len(tree)) if query in path_text(tree, n, text)[-full(tree, n, text, query) :]]
    assert [n for n in range(len(tree)) if tree.matches(n, query, text)] == naive


def path_text(tree: Tree, node: int, text: Callable[[bytes], bytes]) -> bytes:
    own = text(b"".join(tree.contents.tokens[row] for row in tree.rows(node)))
    parent = tree.parent[node]
    return own if parent == NO_NODE else path_text(tree, parent, text) + own


def full(tree: Tree, node: int, text: Callable[[bytes], bytes], query: bytes) -> int:
    """Its own text, and as much before it as a match may begin in."""
    return sum(len(text(tree.contents.tokens[row])) for row in tree.rows(node)) + len(query) - 1


def test_below_a_node_and_a_cursor_whose_node_is_gone() -> None:
    cache = FakeCache()
    common = [1] * BLOCK_SIZE
    cache.store([*common, *[2] * BLOCK_SIZE])
    cache.store([*common, *[3] * BLOCK_SIZE])
    cache.store([4] * 5)
    tree = Tree(contents_of(cache))
    collection = Collection(cache.at, tree.contents, 0.0, tree)
    top = tree.find(cache.blocks[0].hash)  # type: ignore[union-attr]
    below = prefixes_page(collection, tree, Listing(parent=top), (0, b""), 10, TOKENIZER)
    assert [(card.depth, card.first_token, card.parent) for card in below.nodes] == [
        (1, BLOCK_SIZE, cache.blocks[0].hash.hex())  # type: ignore[union-attr]
    ] * 2
    whole = prefixes_page(collection, tree, Listing(), (0, b""), 10, TOKENIZER)
    assert [card.partial for card in whole.nodes] == [False, False, False, True]
    assert [card.parent for card in whole.nodes if card.depth == 0] == [None, None]
    after = prefixes_page(collection, tree, Listing(), (2, b"x" * 32), 10, TOKENIZER)
    assert after.nodes == whole.nodes[2:]
    none = prefixes_page(collection, tree, Listing(), (9, b"x" * 32), 10, TOKENIZER)
    assert (none.nodes, none.next_cursor, none.total) == ([], None, 4)


@pytest.mark.parametrize("cursor", ["1", "1.ab", "x." + "0" * 64, "-1." + "0" * 64, ".", "1." + "g" * 64])
def test_cursors_that_are_none_of_ours_are_refused(cursor: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_cursor(cursor)
    assert (caught.value.status, caught.value.param) == (400, "cursor")


# --- collecting ---------------------------------------------------------------------------------------------


def collector_of(cache: FakeCache) -> Collector:
    async def ask(message: Callable[[int], Any], timeout: float) -> Any:
        return cache.answer(message(0))

    return Collector(cast(Any, SimpleNamespace(ask=ask)))


steps = st.lists(st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 9)), max_size=6)


@given(st.lists(steps, min_size=6, max_size=6), st.integers(0, 99))
def test_a_collection_read_while_the_cache_changes_is_exact(
    changes: list[list[tuple[str, int]]], seed: int
) -> None:
    cache, dice = FakeCache(20), random.Random(seed)
    cache.page, cache.pick = 4, dice.choice
    pending = iter(changes)

    def change() -> None:
        for what, number in next(pending, []):
            used = [i for i, block in enumerate(cache.blocks) if block is not None]
            if what == "remove" and used:
                cache.remove(used[number % len(used)])
            elif what == "store" and len(used) < 15:
                cache.store([number] * (BLOCK_SIZE + number))

    cache.before_page = change
    found = asyncio.run(collector_of(cache).collect(""))
    contents = found.contents
    held = {key for row, key in enumerate(contents.hashes) if contents.blocks[row]}
    assert found.at == cache.at
    assert held == {block.hash for block in cache.blocks if block is not None}
    for key in held:
        row = contents.rows[key]
        block = next(b for b in cache.blocks if b is not None and b.hash == key)
        assert (contents.parents[row], len(contents.tokens[row])) == (block.parent, 4 * len(block.tokens))
        assert cache.blocks[contents.block[row]] == block


def test_one_collection_serves_all_who_ask_and_a_gap_starts_over() -> None:
    cache = FakeCache()
    cache.store([1] * 40)
    cache.page = 60
    collector = collector_of(cache)

    async def many() -> list[Collection]:
        return await asyncio.gather(*(collector.collect("", boot_id=cache.boot_id) for _ in range(5)))

    found = asyncio.run(many())
    assert len({id(collection) for collection in found}) == 1
    assert sum(isinstance(question, BlocksQuery) for question in cache.questions) == 2

    cache.questions.clear()
    gaps = iter([True, True])

    def forget() -> None:
        if next(gaps, False):
            cache.store([len(cache.events)] * 3)
            cache.forget = len(cache.events)

    cache.before_page = forget
    again = asyncio.run(collector_of(cache).collect(""))
    assert again.at == cache.at
    cache.before_page = lambda: (
        cache.store([len(cache.events)]),
        setattr(cache, "forget", len(cache.events)),
    )
    with pytest.raises(ApiError) as caught:
        asyncio.run(collector_of(cache).collect(""))
    assert caught.value.status == 503


def test_cleared_and_the_tier_in_events() -> None:
    cache = FakeCache()
    (first,) = cache.store([1] * 16)
    page = cache.answer(BlocksQuery(0, 0, 9, content=True))
    stored = cache.events[0]
    copy = replace_event(stored, tier="disk")
    found = merge([page], [], [copy], cache.at).contents  # type: ignore[list-item]
    assert (found.blocks, found.flags) == ([1], [2])
    gone = replace_event(stored, kind="removed", tier="disk")
    found = merge([page], [], [copy, gone], cache.at).contents  # type: ignore[list-item]
    assert (found.blocks, found.flags) == ([1], [0])
    other = FakeCache()
    other.store([2] * 16)
    slots: Any = [other.answer(BlocksQuery(0, 0, 9, content=True))]
    both = merge([page], slots, [], cache.at).contents  # type: ignore[list-item]
    assert (both.blocks, both.flags) == ([1, 0], [0, 2])
    assert len(Tree(both)) == 1
    cleared = replace_event(stored, kind="cleared")
    assert merge([page], [], [cleared], cache.at).contents.blocks == [0]  # type: ignore[list-item]
    assert merge([page], [], [cleared, stored], cache.at).contents.blocks == [1]  # type: ignore[list-item]
    assert first == 0


def replace_event(event: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(event, **fields)
