"""The part of the audit that looks at blocks, one range of them at a time: so it can be done in slices while
the manager works. A slice also takes its share of the block tables and of the tier's slots; what can only be
counted is compared when the last block is in the range.
"""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from kvmanager.pool.block_pool import ANYBODY, CACHED, FREE, RESERVED, SEALED, STATE_NAMES, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import NO_SALT, TOKEN_BYTES, block_hash
from kvmanager.pool.ledger import Holder
from kvmanager.state import State


class Slice(NamedTuple):
    """Blocks `first` to `end` of `total`."""

    first: int
    end: int
    total: int

    def share(self, number: int) -> tuple[int, int]:
        """The part of so many other things that goes with this part of the blocks."""
        return number * self.first // self.total, number * self.end // self.total


def audit_blocks(state: State, first: int, end: int) -> Iterator[str]:
    """What is violated, one line each."""
    pool = state.pool
    if pool is None:
        return
    part = Slice(first, end, pool.num_blocks)
    for block in range(first, end):
        yield from _queues(pool, block)
        yield from _content(pool, block)
    yield from _ledger(state, pool, part)
    yield from _tables(state, pool, part)
    yield from _slots(state, part)
    if end == pool.num_blocks:
        yield from _counts(pool)


def name_of(pool: BlockPool, block: int) -> str:
    return STATE_NAMES[pool.state[block]]


def _queues(pool: BlockPool, block: int) -> Iterator[str]:
    kind, references = pool.state[block], pool.ledger.ref_count(block)
    places = (block in pool.free, block in pool.cached, block in pool.backed)
    if places[0] != (kind == FREE) or sum(places[1:]) != (kind == CACHED):
        yield f"block {block} is {STATE_NAMES[kind]} and in the wrong queue"
    if (references == 0) != (kind in (FREE, CACHED)):
        yield f"block {block} is {STATE_NAMES[kind]} with {references} references"


def _content(pool: BlockPool, block: int) -> Iterator[str]:
    """A sealed block is found under its hash, as a child of its parent and under its salt, once each; but not
    one that is to be found no more. Nothing else has content.
    """
    digest, parent, salt, tokens = pool.contents[block]
    unfound = block in pool.unfound
    if pool.state[block] not in (SEALED, CACHED):
        if digest or tokens or unfound or block in pool.partial:
            yield f"block {block} is {name_of(pool, block)} and has a hash or tokens"
        return
    if (block in pool.index.blocks(digest)) == unfound:
        yield f"block {block} is {name_of(pool, block)} and the index says otherwise"
    if block_hash(parent, tokens, salt) != digest or not 0 < len(tokens) <= pool.block_size * TOKEN_BYTES:
        yield f"block {block} has a hash that is not that of its content"
    if (len(tokens) < pool.block_bytes) != (block in pool.partial):
        yield f"block {block} has {len(tokens) // TOKEN_BYTES} tokens and is taken for another length"
    if pool.children.has(parent + salt, block) == unfound:
        yield f"block {block} is not the child that it should be"
    if (block in pool.of_salt.get(salt, ())) != (salt != NO_SALT and not unfound):
        yield f"block {block} is not among those of its salt"
    if unfound and (pool.state[block] == CACHED or pool.record(block).owner_tag != ANYBODY):
        yield f"block {block} is to be found no more, and kept"


def _counts(pool: BlockPool) -> Iterator[str]:
    states = bytes(pool.state)
    for kind, name in enumerate(STATE_NAMES):
        if states.count(kind) != pool.counts[kind]:
            yield f"{states.count(kind)} blocks are {name} and {pool.counts[kind]} are counted"
    found = pool.counts[SEALED] + pool.counts[CACHED] - len(pool.unfound)
    numbers = {
        "in the index": pool.index.num_blocks,
        "and a child": pool.children.num_blocks,
    }
    for words, number in numbers.items():
        if number != found:
            yield f"{number} blocks are {words}, and {found} can be found"
    if (len(pool.free), len(pool.cached) + len(pool.backed)) != (pool.counts[FREE], pool.counts[CACHED]):
        yield "the queues are longer or shorter than they are counted"


def _ledger(state: State, pool: BlockPool, part: Slice) -> Iterator[str]:
    """Whoever the ledger lists for these blocks has them, and nobody else that it lists here."""
    window = range(part.first, part.end)
    known = {id(holder) for block in window for holder in pool.ledger.holders(block)}
    expected: dict[int, list[Holder]] = {}
    inside = set(window)
    for holder, blocks in _holdings(state):
        for block in inside.intersection(blocks) if id(holder) in known else ():
            expected.setdefault(block, []).append(holder)
    for block in window:
        listed, wanted = pool.ledger.holders(block), expected.get(block, [])
        if len(listed) != len(wanted) or set(listed) != set(wanted):
            names = [holder.describe() for holder in listed]
            yield f"block {block} is held by {names} and wanted by {[holder.describe() for holder in wanted]}"


def _holdings(state: State) -> Iterator[tuple[Holder, Collection[int]]]:
    """Everyone who holds blocks, and which."""
    for runner in state.runners:
        yield runner, runner.credits
    for sequence in state.sequences():
        yield sequence, sequence.table
        if sequence.source is not None:
            yield sequence, (sequence.source,)
    for pin in state.pins.holders():
        yield pin, pin.blocks
    for quarantine in state.quarantines.values():
        yield quarantine, quarantine.blocks
    if state.tiering is not None:
        yield state.tiering.demoter, [copy.block for copy in state.tiering.tier.demoting.values()]
        for comeback in set(state.tiering.comebacks.values()):
            yield comeback, comeback.blocks


def _tables(state: State, pool: BlockPool, part: Slice) -> Iterator[str]:
    """Whatever anybody has, the ledger says so; and tables hold their sequences' tokens as far as they are
    sealed, and blocks to write from there on.
    """
    holdings = list(_holdings(state))
    start, stop = part.share(sum(len(blocks) for _, blocks in holdings))
    offset = 0
    for holder, blocks in holdings:
        length = len(blocks)
        first, end = max(start - offset, 0), min(stop - offset, length)
        for index, block in enumerate(islice(blocks, first, end), first) if first < end else ():
            if holder not in pool.ledger.holders(block):
                yield f"block {block} is held by somebody else than {holder.describe()}"
            if isinstance(holder, Sequence) and blocks is holder.table:
                yield from _entry(pool, holder, index)
        offset += length


def _entry(pool: BlockPool, sequence: Sequence, index: int) -> Iterator[str]:
    block, size = sequence.table[index], pool.block_size
    if index >= sequence.num_sealed:
        if pool.state[block] != RESERVED:
            yield f"{sequence.describe()} writes block {block}, which is {name_of(pool, block)}"
        return
    packed = sequence.tokens[index * size : (index + 1) * size].tobytes()
    parent = pool.block_hash[sequence.table[index - 1]] if index else pool.root
    if pool.state[block] != SEALED or pool.tokens[block] != packed or pool.parent_hash[block] != parent:
        yield f"{sequence.describe()} reads block {block}, which does not hold its tokens"


def _slots(state: State, part: Slice) -> Iterator[str]:
    if state.tiering is None:
        return
    tier = state.tiering.tier
    first, end = part.share(tier.num_slots)
    for slot, content in enumerate(tier.slots(first, end), first):
        if content is None:
            continue
        if block_hash(content.parent_hash, content.tokens, content.salt) != content.block_hash:
            yield f"slot {slot} has a hash that is not that of its content"
        if tier.contents_by_hash().get(content.block_hash) != (slot, content):
            yield f"slot {slot} holds what is not found there"
