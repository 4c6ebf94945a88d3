"""GET /kv/map, /kv/blocks/{id} and /kv/prefixes: what the pool holds."""

import asyncio
from array import array
from bisect import bisect_left
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager.protocol import (
    FLAG_IN_TIER,
    FLAG_OTHER,
    FLAG_PINNED,
    MAX_PAGE,
    BlockDetail,
    BlockQuery,
    BlocksPage,
    BlocksQuery,
)
from services.auth import observer
from services.context import Context
from services.errors import ApiError, invalid
from services.kv import answers
from services.kv.ask import Parameters, ask, holder_card, reply
from services.kv.collect import Collection, Collector, uncollected
from services.kv.contents import TOKEN_BYTES
from services.kv.tree import NO_NODE, SORTS, Listing, Tree, leading, page_after
from services.text.tokenizer import Tokenizer

MAX_MAP: Final = 8192  # blocks of one answer
MAX_BLOCK_ID: Final = (1 << 31) - 1
MAX_NODES: Final = 1000  # of one answer
MAX_LEVELS: Final = 1 << 20
MAX_QUERY_CHARS: Final = 200
TEXT_CHARS: Final = 200  # shown of a node
MAX_CURSOR_CHARS: Final = 100
LETTERS: Final = "FRSCQ"
OTHER: Final = "X"
NOTHING: Final = bytes(32)  # no block has this hash
STATES: Final = ("FREE", "RESERVED", "SEALED", "CACHED", "QUARANTINED")


class PagesRoutes:
    """The three."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._backend = context.backend
        self._config = context.config
        self._tokenizer = context.model.tokenizer
        self._collector = collector

    def routes(self) -> list[Route]:
        return [
            Route("/kv/map", self.map),
            Route("/kv/blocks/{id}", self.block),
            Route("/kv/prefixes", self.prefixes),
        ]

    async def map(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        given = Parameters(request, ("first", "limit", "since"))
        first = given.number("first", 0, 0, MAX_BLOCK_ID)
        limit = given.number("limit", MAX_PAGE, 1, MAX_MAP)
        given.number("since", 0, 0, 1 << 48)
        if tenant:
            return reply(own_map(await self._collector.collect(tenant), first, limit))
        pages: list[BlocksPage] = []
        at, end = first, first + limit
        while at < end:
            query = partial(BlocksQuery, first=at, limit=min(MAX_PAGE, end - at), tenant=tenant)
            pages.append(await ask(self._backend, query, BlocksPage))
            at += len(pages[-1].states)
            if not pages[-1].states or at >= pages[-1].num_blocks:
                break
        return reply(map_answer(pages, first))

    async def block(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        Parameters(request, ())
        given: str = request.path_params["id"]
        largest = (1 << 48) - 1 if tenant else MAX_BLOCK_ID
        if not (given.isascii() and given.isdecimal() and len(given) < 16 and int(given) <= largest):
            raise invalid("id", f"`id` is {given[:40]!r}; want a block's number")
        number = int(given)
        query = partial(BlockQuery, block_id=number)
        if tenant:
            contents = (await self._collector.collect(tenant)).contents
            place = bisect_left(contents.shown(), number, key=contents.block.__getitem__)
            row = contents.shown()[place] if place < len(contents) else -1
            digest = contents.hashes[row] if row >= 0 and contents.block[row] == number else NOTHING
            query = partial(BlockQuery, tenant=tenant, block_hash=digest)
        detail = await ask(self._backend, query, BlockDetail)
        if not detail.state:
            message = f"there is no block {number}, or it is not yours to see"
            raise ApiError(404, message, param="id", code="not_found")
        return reply(block_answer(detail, self._tokenizer))

    async def prefixes(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        given = Parameters(request, ("parent", "depth", "limit", "sort", "order", "cursor", "q"))
        parent = given.digest("parent")
        levels = given.number("depth", MAX_LEVELS, 1, MAX_LEVELS)
        limit = given.number("limit", 100, 1, MAX_NODES)
        sort, order = given.choice("sort", SORTS), given.choice("order", ("desc", "asc"))
        cursor = read_cursor(given.text("cursor", MAX_CURSOR_CHARS))
        query = given.text("q", MAX_QUERY_CHARS).lower().encode("utf-8", "replace")
        collection = await self._collector.collect(tenant)

        def page() -> answers.PrefixesAnswer:
            tree = collection.tree = collection.tree or Tree(collection.contents)
            above = tree.find(parent) if parent else NO_NODE
            if parent and above == NO_NODE:
                message = f"nothing with the hash {parent.hex()} is cached"
                raise ApiError(404, message, param="parent", code="not_found")
            listing = Listing(sort, order, above, levels, query)  # type: ignore[arg-type]
            return prefixes_page(collection, tree, listing, cursor, limit, self._tokenizer)

        async with self._collector.turn:
            with uncollected():
                return reply(await asyncio.to_thread(page))


def map_answer(pages: list[BlocksPage], first: int) -> answers.MapAnswer:
    """Pages that follow on one another; the answer has the number of the first one's event."""
    head = pages[0]
    flags = b"".join([page.flags for page in pages])
    states = b"".join([page.states for page in pages])
    end = first + len(states)
    return answers.MapAnswer(
        boot_id=head.at.boot_id,
        sequence=head.at.sequence,
        num_blocks=head.num_blocks,
        block_size=head.block_size,
        block_bytes=head.block_bytes,
        first=first,
        next=end if end < head.num_blocks else None,
        states="".join(
            [
                OTHER if flag & FLAG_OTHER else LETTERS[state]
                for state, flag in zip(states, flags, strict=True)
            ]
        ),
        ref_counts=list(b"".join([page.ref_counts for page in pages])),
        num_tokens=[tokens for page in pages for tokens in page.num_tokens],
        ages=[short_age(age) for page in pages for age in page.ages],
        flags=list(flags),
    )


def own_map(collection: Collection, first: int, limit: int) -> answers.MapAnswer:
    """A tenant's: what of its own is found in the pool."""
    contents, at = collection.contents, collection.at
    found = [row for row in contents.shown() if contents.blocks[row]]
    rows = found[first : first + limit]
    return answers.MapAnswer(
        boot_id=at.boot_id,
        sequence=at.sequence,
        num_blocks=len(found),
        block_size=contents.block_size,
        block_bytes=contents.block_bytes,
        first=first,
        next=first + limit if first + limit < len(found) else None,
        states="".join(["S" if contents.references[row] else "C" for row in rows]),
        ref_counts=[contents.references[row] for row in rows],
        num_tokens=[len(contents.tokens[row]) // TOKEN_BYTES for row in rows],
        ages=[short_age(contents.ages[row]) for row in rows],
        flags=[contents.flags[row] for row in rows],
        blocks=[contents.block[row] for row in rows],
    )


def short_age(age: float) -> float:
    return int(age) if age >= 10 or age == 0 else round(age, 1)


def block_answer(detail: BlockDetail, tokenizer: Tokenizer) -> answers.BlockAnswer:
    return answers.BlockAnswer(
        boot_id=detail.at.boot_id,
        sequence=detail.at.sequence,
        block=detail.block[0],
        generation=detail.block[1],
        state=detail.state,  # type: ignore[arg-type]
        ref_count=detail.ref_count,
        holders=[holder_card(holder) for holder in detail.holders],
        hash=detail.block_hash,
        parent=detail.parent_hash,
        parent_block=detail.parent_block if detail.parent_block >= 0 else None,
        first_token=detail.first_token if detail.first_token >= 0 else None,
        num_tokens=len(detail.token_ids),
        token_ids=list(detail.token_ids),
        text=tokenizer.decode(detail.token_ids, skip_special_tokens=False),
        age=round(detail.age, 3),
        hits=detail.hits,
        copies=list(detail.copies),
        children=detail.children,
        pins=list(detail.pins),
        in_tier=detail.in_tier,
        eviction_rank=detail.eviction_rank if detail.eviction_rank >= 0 else None,
    )


# --- the tree -----------------------------------------------------------------------------------------------


def read_cursor(text: str) -> tuple[int, bytes]:
    """`<how many were shown>.<hash of the last one>`. Raises ApiError 400."""
    ordinal, _, digest = text.partition(".")
    try:
        found = bytes.fromhex(digest)
    except ValueError:
        found = b"?"
    if text and not (ordinal.isascii() and ordinal.isdecimal() and len(ordinal) < 16 and len(found) == 32):
        raise invalid("cursor", "`cursor` is not one that an answer gave as `next_cursor`")
    return (int(ordinal), found) if text else (0, b"")


def prefixes_page(
    collection: Collection,
    tree: Tree,
    listing: Listing,
    cursor: tuple[int, bytes],
    limit: int,
    tokenizer: Tokenizer,
) -> answers.PrefixesAnswer:
    """Runs beside the event loop."""
    text = partial(text_bytes, tokenizer)
    nodes = tree.listed(listing, text)
    start = page_after(tree, nodes, *cursor) if cursor[1] else 0
    shown = nodes[start : start + limit]
    end = start + len(shown)
    hashes, last = tree.contents.hashes, tree.last
    return answers.PrefixesAnswer(
        boot_id=collection.at.boot_id,
        sequence=collection.at.sequence,
        nodes=[node_card(tree, node, listing, tokenizer) for node in shown],
        next_cursor=f"{end}.{hashes[last[shown[-1]]].hex()}" if shown and end < len(nodes) else None,
        total=len(nodes),
    )


def node_card(tree: Tree, node: int, listing: Listing, tokenizer: Tokenizer) -> answers.NodeCard:
    contents, first, last = tree.contents, tree.first[node], tree.last[node]
    begin = leading(tree.rows(node), contents.tokens, TEXT_CHARS)
    flags = [contents.flags[row] for row in tree.rows(node)]
    first_token = tree.first_token[node]
    at_root = tree.parent[node] == NO_NODE and first_token == 0
    return answers.NodeCard(
        hash=contents.hashes[last].hex(),
        parent=None if at_root else contents.parents[first].hex(),
        depth=tree.depth[node],
        block=contents.block[first],
        blocks=tree.blocks[node],
        tokens=tree.tokens[node],
        text=text_bytes(tokenizer, begin).decode("utf-8", "replace")[:TEXT_CHARS],
        first_token=None if first_token < 0 else first_token,
        references=tree.references[node],
        hits=tree.hits[node],
        bytes=tree.blocks[node] * contents.block_bytes,
        age=round(tree.oldest[node], 1),
        partial=len(contents.tokens[last]) < contents.block_size * TOKEN_BYTES,
        in_tier=all(flag & FLAG_IN_TIER for flag in flags),
        pinned=all(flag & FLAG_PINNED for flag in flags),
        salt=contents.salts[last].hex(),
        subtree=answers.SubtreeCard(
            tree.subtree_blocks[node],
            tree.subtree_tokens[node],
            tree.subtree_blocks[node] * contents.block_bytes,
            tree.subtree_hits[node],
        ),
        children=len(tree.children.get(node, ())),
        match=bool(listing.query) and tree.matches(node, listing.query, partial(text_bytes, tokenizer)),
    )


def text_bytes(tokenizer: Tokenizer, tokens: bytes) -> bytes:
    """Packed tokens as bytes of UTF-8."""
    return b"".join(map(tokenizer.token_bytes, unpacked(tokens)))


def unpacked(tokens: bytes) -> "array[int]":
    return array("I", tokens)
