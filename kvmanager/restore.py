"""A warm start: the block pool that the records of an earlier start describe.

A sealed record whose hash is right is content. A free one is free. Everything else may still be written by a
process of the earlier start: it is quarantined for that process if it lives (all of them, where the record
is damaged and so does not say which), else it is free.
"""

from collections.abc import Sequence

from kvmanager.asking.event_log import EventLog
from kvmanager.pool.block_pool import FREE, RESERVED, SEALED, BlockPool, BlockRecord
from kvmanager.pool.hashing import TOKEN_BYTES, block_hash, root_hash
from kvmanager.protocol import Layout
from kvmanager.scheduling.clients import Quarantine, owner_tag

DAMAGED = ""  # the quarantine that waits for every survivor; no lock has this name


def restore_pool(
    layout: Layout,
    records: Sequence[BlockRecord | None],
    survivors: Sequence[str],
    log: EventLog | None = None,
) -> tuple[BlockPool, tuple[Quarantine, ...]]:
    """`records`: one per block, None where it is damaged; `survivors`: locks that are held now."""
    pool = BlockPool(len(records), layout, log)
    by_tag = {owner_tag(lock): Quarantine(lock) for lock in survivors}
    by_tag[owner_tag(DAMAGED)] = Quarantine(DAMAGED)
    newest = max((record.generation for record in records if record is not None), default=0)
    sealed: dict[int, BlockRecord] = {}
    for block, record in enumerate(records):
        pool.generation[block] = newest + 1 if record is None else record.generation
        if record is not None and record.state == SEALED and is_content(pool, record):
            sealed[block] = record
            continue
        suspect = record is None or record.state == SEALED
        tag = (
            owner_tag(DAMAGED)
            if suspect
            else record.owner_tag
            if record and record.state == RESERVED
            else b""
        )
        quarantine = by_tag.get(tag)
        if quarantine is not None and survivors:
            pool.restore_quarantined(block, quarantine)
            quarantine.blocks.append(block)
        if record is None or record.state != FREE:
            pool.changed.add(block)
    pool.restore_all({block: sealed[block] for block in eviction_order(sealed)})
    return pool, tuple(quarantine for quarantine in by_tag.values() if quarantine.blocks)


def former_contents(
    layout: Layout, records: Sequence[BlockRecord | None], new_layout: Layout, when: float
) -> dict[bytes, float]:
    """What a pool of `layout` held when it was emptied at `when`, under the hashes that the same texts have
    in a pool of `new_layout`; nothing if that is the same layout.
    """
    children: dict[bytes, list[BlockRecord]] = {}
    for record in records if layout != new_layout else ():
        if record is not None and record.state == SEALED:
            children.setdefault(record.parent_hash, []).append(record)
    width, found = new_layout.block_size * TOKEN_BYTES, dict[bytes, float]()
    root = root_hash(layout)
    stack = [(record, b"", root_hash(new_layout)) for record in children.pop(root, ())]
    while stack:
        record, rest, parent = stack.pop()
        if block_hash(record.parent_hash, record.tokens, record.salt) != record.block_hash:
            continue
        rest += record.tokens
        while len(rest) >= width:
            parent = block_hash(parent, rest[:width], record.salt)
            found[parent] = when
            rest = rest[width:]
        for child in children.get(record.block_hash, ()):
            stack.append((child, rest, parent))
    return found


def is_content(pool: BlockPool, record: BlockRecord) -> bool:
    """Whether the record's hash is that of its tokens, a full block of them or a sequence's tail."""
    fits = 0 < len(record.tokens) <= pool.block_size * TOKEN_BYTES
    return fits and block_hash(record.parent_hash, record.tokens, record.salt) == record.block_hash


def eviction_order(sealed: dict[int, BlockRecord]) -> list[int]:
    """First to be evicted first: by the time at which a block or anything below it was sealed, tail before
    head.
    """
    by_hash = {record.block_hash: block for block, record in sealed.items()}
    latest_first = sorted(sealed, key=lambda block: sealed[block].sealed_at, reverse=True)
    kept: dict[int, None] = {}  # last to be evicted first: each block after all that it hangs on
    for last in latest_first:
        chain: list[int] = []
        block: int | None = last
        while block is not None and block not in kept:
            chain.append(block)
            block = by_hash.get(sealed[block].parent_hash)
        kept.update(dict.fromkeys(reversed(chain)))
    return list(kept)[::-1]
