"""Walks over what is cached that forget it as they go: of some salts, or a prefix and all that follows it.

Each step is small, and between two of them anything may happen to any block: a walk looks again before it
touches one. First the pool's blocks, then the tier's.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Literal

from kvmanager.pool.block_pool import CACHED, BlockPool
from kvmanager.pool.hashing import NO_SALT
from kvmanager.tier.tiering import Comeback, Demoter
from kvmanager.tier.tiers import Tier

Step = Literal["look", "evicted", "in_use", "pause"]

MANY = 8192  # blocks
LOOKS = 4  # blocks or slots that count as one look, where most are passed over


def forget_salts(
    pool: BlockPool, tier: Tier | None, wanted: Callable[[bytes], bool], force: bool
) -> Iterator[Step]:
    """All under salts that are `wanted`; with `force` what is in use is found no more."""
    for block in range(pool.num_blocks) if wanted(NO_SALT) else ():
        if pool.block_hash[block] and not pool.salt[block] and block not in pool.unfound:
            yield forget_block(pool, block, force)
        elif block % LOOKS == 0:
            yield "look"
    for salt in [salt for salt in pool.of_salt if wanted(salt)]:
        blocks = list(pool.of_salt.get(salt, ()))
        if len(blocks) > MANY:
            yield "pause"  # this alone took its time
        for block in blocks:
            if block in pool.of_salt.get(salt, ()):
                yield forget_block(pool, block, force)
    if tier is not None:
        for slot in range(tier.num_slots):
            (content,) = tier.slots(slot, slot + 1)
            if content is not None and wanted(content.salt):
                tier.forget(content.block_hash)
                yield "evicted"
            elif slot % LOOKS == 0:
                yield "look"
        for copy in list(tier.demoting.values()):
            if wanted(copy.content.salt):
                tier.forget(copy.content.block_hash)
                yield "look"


def forget_block(pool: BlockPool, block: int, force: bool = False) -> Step:
    """It must be found now. What is only being copied is not in use: it is free when that is over."""
    if pool.state[block] == CACHED:
        pool.evict(block)
        return "evicted"
    copied = all(isinstance(holder, Demoter | Comeback) for holder in pool.ledger.holders(block))
    if force or copied:
        pool.unfind(block)
    return "evicted" if copied else "in_use"


def forget_prefix(
    pool: BlockPool, tier: Tier | None, salt: bytes, prefix: bytes, short: bytes
) -> Iterator[Step]:
    """The block with the hash `prefix` and all that follow it; without one, all that begin with the packed
    tokens `short`.
    """
    first = [prefix] if prefix else beginning(pool, salt, short)
    stack, seen = list(first), set(first)
    while stack:
        digest = stack.pop()
        for block in pool.index.blocks(digest):
            if block in pool.index.blocks(digest) and pool.salt[block] == salt:
                yield forget_block(pool, block)
        for _, child in list(pool.children.of(digest + salt)):
            below = pool.block_hash[child]
            if below not in seen:
                seen.add(below)
                stack.append(below)
            yield "look"
    if tier is not None:
        yield from forget_below(tier, salt, seen, pool.root, short)


def beginning(pool: BlockPool, salt: bytes, tokens: bytes) -> list[bytes]:
    """Hashes of first blocks that begin with these tokens."""
    siblings = pool.children.of(pool.root + salt)
    found = []
    for place in range(bisect_left(siblings, (tokens,)), len(siblings)):
        packed, block = siblings[place]
        if not packed.startswith(tokens):
            break
        found.append(pool.block_hash[block])
    return found


def forget_below(tier: Tier, salt: bytes, known: set[bytes], root: bytes, short: bytes) -> Iterator[Step]:
    """What the tier has of these hashes and what follows them, and first blocks that begin with `short`."""
    by_parent: dict[bytes, list[bytes]] = {}
    stack = list(known)
    for slot in range(tier.num_slots):
        (content,) = tier.slots(slot, slot + 1)
        if content is not None and content.salt == salt:
            by_parent.setdefault(content.parent_hash, []).append(content.block_hash)
            if short and content.parent_hash == root and content.tokens.startswith(short):
                stack.append(content.block_hash)
        if slot % LOOKS == 0:
            yield "look"
    for copy in tier.demoting.values():
        if copy.content.salt == salt:
            by_parent.setdefault(copy.content.parent_hash, []).append(copy.content.block_hash)
    done: set[bytes] = set()
    while stack:
        digest = stack.pop()
        if digest not in done:
            done.add(digest)
            stack += by_parent.get(digest, ())
            kept = digest in tier.contents_by_hash()
            tier.forget(digest)
            if kept:
                yield "evicted"
        yield "look"
