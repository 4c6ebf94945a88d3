"""Block pool: the life of every block, from free over granted and sealed to cached, and back.

    FREE ──grant──▶ RESERVED ──seal──▶ SEALED ──last release──▶ CACHED ──evict──▶ FREE
     ▲                 │ release          ▲──────────hold──────────┘
     └─────────────────┴── QUARANTINED (a writer that may still live)

A sealed block is full, or partial: the tail of a sequence that has ended. A partial one is found only as a
child of its parent, to copy from; it is never written again.

Everything about a block is in parallel lists indexed by its id. Each change of state is one method here; it
keeps the queues, the index and the ledger in step, and notes the block in `changed`:
its record must be written before any message that depends on it leaves.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from kvmanager.asking.event_log import EventLog
from kvmanager.pool.children import Children
from kvmanager.pool.free_queue import FreeQueue
from kvmanager.pool.hashing import NO_HASH, NO_SALT, NOTHING, TOKEN_BYTES, Held, root_hash
from kvmanager.pool.ledger import Holder, Ledger
from kvmanager.pool.prefix_index import PrefixIndex
from kvmanager.protocol import BlockRef, Layout, PoolStats

NO_OWNER = bytes(8)
ANYBODY = sha256(b"").digest()[:8]  # owner tag of a block that any process may still use

FREE, RESERVED, SEALED, CACHED, QUARANTINED = range(5)
STATE_NAMES = ("FREE", "RESERVED", "SEALED", "CACHED", "QUARANTINED")


class BlockRecord(NamedTuple):
    """What `blocks.meta` keeps of a block. CACHED is SEALED here; the others have no hashes or tokens."""

    state: int
    generation: int
    owner_tag: bytes  # 8 bytes: who may write it while RESERVED
    block_hash: bytes
    parent_hash: bytes
    salt: bytes
    tokens: bytes  # packed
    sealed_at: float  # seconds, CLOCK_MONOTONIC


class Column:
    """One field of what every block holds, by block: for those who have no need of the others, nor haste."""

    __slots__ = ("_contents", "_field")

    def __init__(self, contents: list[Held], field: int) -> None:
        self._contents = contents
        self._field = field

    def __getitem__(self, block: int) -> bytes:
        return self._contents[block][self._field]

    def __iter__(self) -> Iterator[bytes]:
        return (content[self._field] for content in self._contents)


class BlockPool:
    """All blocks of one layout. New: every block is free."""

    __slots__ = (
        "backed",
        "block_bytes",
        "block_hash",
        "block_size",
        "cached",
        "changed",
        "children",
        "contents",
        "evictions",
        "free",
        "generation",
        "hits",
        "index",
        "layout",
        "ledger",
        "log",
        "may_evict",
        "num_blocks",
        "num_quarantined",
        "num_sealed",
        "of_salt",
        "parent_hash",
        "partial",
        "root",
        "salt",
        "sealed_at",
        "state",
        "tokens",
        "unfound",
    )

    def __init__(self, num_blocks: int, layout: Layout, log: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_size = layout.block_size
        self.block_bytes = layout.block_size * TOKEN_BYTES  # of a full block's packed tokens
        self.root = root_hash(layout)
        self.state = [FREE] * num_blocks
        self.generation = [0] * num_blocks
        self.contents: list[Held] = [NOTHING] * num_blocks
        self.block_hash, self.parent_hash, self.salt, self.tokens = (
            Column(self.contents, field) for field in range(4)
        )
        self.sealed_at = [0.0] * num_blocks
        self.hits = [0] * num_blocks
        """How often requests began with this content."""
        self.free = FreeQueue(num_blocks)
        self.cached = FreeQueue(num_blocks)
        self.backed = FreeQueue(num_blocks)
        """Cached blocks that need no copy any more, as a tier has their content: evicted before `cached`."""
        self.index = PrefixIndex()
        self.children = Children(self.contents)
        self.of_salt: dict[bytes, set[int]] = {}
        """Blocks in the index, by the salt that finds them; most have none, and are not here."""
        self.partial: set[int] = set()
        """Sealed blocks that are not full."""
        self.unfound: set[int] = set()
        """Sealed blocks that are to be found no more: they are free as soon as nobody holds them."""
        self.log = log or EventLog()
        self.ledger = Ledger(num_blocks)
        self.num_sealed = 0
        self.num_quarantined = 0
        self.changed: set[int] = set()
        self.may_evict = True
        """False while processes of an earlier start may still read blocks that only look unused."""
        self.evictions = 0
        self.free.extend(range(num_blocks))

    @property
    def available(self) -> int:
        """Blocks that can be granted now."""
        free = self.free.length
        return free + self.backed.length + self.cached.length if self.may_evict else free

    @property
    def counts(self) -> list[int]:
        """Blocks by state."""
        free, cached = len(self.free), len(self.backed) + len(self.cached)
        reserved = self.num_blocks - free - self.num_sealed - cached - self.num_quarantined
        return [free, reserved, self.num_sealed, cached, self.num_quarantined]

    def ref(self, block: int) -> BlockRef:
        return (block, self.generation[block])

    def refs(self, blocks: Iterable[int]) -> tuple[BlockRef, ...]:
        generation, refs = self.generation, []
        for block in blocks:
            refs.append((block, generation[block]))
        return tuple(refs)

    def grant(self, holder: Holder) -> int:
        """A block for `holder` to write, as of `grant_all`."""
        return self.grant_all(1, holder)[0]

    def grant_all(self, count: int, holder: Holder) -> list[int]:
        """So many blocks for `holder` to write, of the `available`: free ones, then those next to evict."""
        generation, state = self.generation, self.state
        holders, sole = self.ledger.by_block, (holder,)
        free = self.free.length
        blocks = self.free.pop_all(min(count, free)) if free else []
        if free < count:
            blocks += self._evict(count - free)
        for block in blocks:
            generation[block] += 1
            state[block] = RESERVED
            holders[block] = sole
        self.changed.update(blocks)
        return blocks

    def seal_tail(self, block: int, content: Held, now: float) -> None:
        """A sequence has ended in this block, which is not full: others find it, to copy from."""
        assert 0 < len(content[3]) < self.block_bytes
        self.partial.add(block)
        self.seal(block, content, now)

    def seal(self, block: int, content: Held, now: float) -> None:
        """The block is full and never written again: from now on it is found."""
        digest, parent_hash, salt, tokens = content
        assert self.state[block] == RESERVED
        self.contents[block] = content
        self.sealed_at[block] = now
        self.hits[block] = 0
        self.state[block] = SEALED
        self.num_sealed += 1
        self.changed.add(block)
        if (
            not salt
            and self.index.primary.setdefault(digest, block) == block
            and self.children.only.setdefault(parent_hash, block) == block
        ):  # what `_publish` does, where that concerns no other block, and fast
            self.log.stored(content, block)
        elif self._publish(block, content):
            for other in self.children.beginnings(parent_hash + salt, tokens):
                if other in self.cached and self.is_partial(other):
                    self.cached.remove(other)
                    self.cached.prepend(other)

    def is_partial(self, block: int) -> bool:
        """Whether it is sealed with less than a full block of tokens."""
        return block in self.partial

    def find(self, content: Held) -> int | None:
        """The block with this content. All of it is compared: a hash alone is never trusted."""
        block = self.index.primary.get(content[0])
        return None if block is None or self.contents[block] != content else block

    def holds(self, block: int, content: Held) -> bool:
        """Whether this very block, of whatever number, is to be found with this content."""
        return 0 <= block < self.num_blocks and block not in self.unfound and self.contents[block] == content

    def hold(self, block: int, holder: Holder) -> None:
        """One more holder of a block that is in use or cached."""
        if self.state[block] == CACHED:
            (self.backed if block in self.backed else self.cached).remove(block)
            self.state[block] = SEALED
            self.num_sealed += 1
        assert self.state[block] != FREE, f"block {block} is free: grant it"
        self.ledger.add(block, holder)

    def set_aside(self, block: int) -> None:
        """This cached block need not be copied before it is evicted."""
        self.cached.remove(block)
        self.backed.append(block)

    def release(self, block: int, holder: Holder) -> None:
        """`holder` no longer needs the block. After the last one it is cached if it is sealed, else free.

        It is evicted after all that are cached now; but a partial one that a sibling covers, before them.
        """
        self.release_all((block,), holder)

    def release_all(self, blocks: Iterable[int], holder: Holder) -> None:
        """The same for each of them, in this order."""
        state, partial, unfound = self.state, self.partial, self.unfound
        kept: list[int] = []
        holders, sole = self.ledger.by_block, (holder,)
        for block in blocks:
            if holders[block] != sole:
                self.ledger.remove(block, holder)
                continue
            holders[block] = ()
            if state[block] != SEALED or block in unfound:
                self._free(block)
                continue
            state[block] = CACHED
            if block not in partial or not self._is_covered(block):
                kept.append(block)
            else:
                self.num_sealed -= 1
                self.cached.prepend(block)
        self.num_sealed -= len(kept)
        self.cached.extend(kept)

    def evictable(self) -> Iterator[int]:
        """Cached blocks in the order in which they are evicted if nothing else happens."""
        return chain(self.backed, self.cached)

    def evict(self, block: int) -> None:
        """Forget what this cached block holds, whenever its turn would have come."""
        assert self.may_evict, "no block may be evicted now"
        (self.backed if block in self.backed else self.cached).remove(block)
        self._unpublish(block)
        self._free(block)

    def unfind(self, block: int) -> None:
        """This block in use is found no more; those who hold it go on with it."""
        assert self.state[block] == SEALED
        self._unpublish(block)
        self.unfound.add(block)
        self.changed.add(block)

    def seal_unfound(self, block: int, content: Held, now: float) -> None:
        """Seal a block that nobody shall find, as it follows one that is found no more."""
        assert self.state[block] == RESERVED
        self.contents[block], self.sealed_at[block], self.state[block] = content, now, SEALED
        self.num_sealed += 1
        self.unfound.add(block)
        self.changed.add(block)

    def quarantine(self, block: int) -> None:
        """Its writer was told to stop but may not have: it stays out of use until its holder releases it."""
        assert self.state[block] == RESERVED
        self.state[block] = QUARANTINED
        self.num_quarantined += 1

    def take_out_of_quarantine(self, block: int, holder: Holder, successor: Holder) -> None:
        """Its writer has said what it is for, and goes on: it is `successor`'s, instead of `holder`'s."""
        assert self.state[block] == QUARANTINED
        self.state[block] = RESERVED
        self.num_quarantined -= 1
        self.ledger.replace(block, holder, successor)

    def restore_all(self, records: dict[int, BlockRecord]) -> None:
        """At start: take sealed blocks over from their records as cached, the first to be evicted first; they
        must still be new.
        """
        state, contents = self.state, self.contents
        for block, record in records.items():
            kind, _, _, digest, parent_hash, salt, tokens, sealed_at = record
            assert (state[block], kind) == (FREE, SEALED)
            self.free.remove(block)
            contents[block] = content = (digest, parent_hash, salt, tokens)
            self.sealed_at[block], state[block] = sealed_at, CACHED
            if len(tokens) < self.block_bytes:
                self.partial.add(block)
            self._publish(block, content)
        self.cached.extend(list(records))

    def restore_quarantined(self, block: int, holder: Holder) -> None:
        """At start: a block that a process of an earlier start may still write; it must still be new."""
        self.free.remove(block)
        self.state[block] = QUARANTINED
        self.num_quarantined += 1
        self.ledger.add(block, holder)

    def record(self, block: int) -> BlockRecord:
        """What to write for this block; a QUARANTINED one is RESERVED to its writer, and one that is found no
        more to whoever may read it.
        """
        state = self.state[block]
        if state in (SEALED, CACHED) and block not in self.unfound:
            held, sealed_at = self.contents[block], self.sealed_at[block]
            return BlockRecord(SEALED, self.generation[block], NO_OWNER, *held, sealed_at)
        if state == FREE:
            kept, owner = FREE, NO_OWNER
        else:  # all who hold it are of the process that writes it
            kept, owner = RESERVED, self.ledger.holders(block)[0].owner_tag
        owner = ANYBODY if block in self.unfound else owner
        return BlockRecord(kept, self.generation[block], owner, NO_HASH, NO_HASH, NO_SALT, b"", 0.0)

    def statistics(self) -> PoolStats:
        """Blocks by state."""
        return PoolStats(self.num_blocks, self.block_size, *self.counts)

    def _evict(self, count: int) -> list[int]:
        """Forget the content of the blocks that are next, which are no longer counted then."""
        assert self.may_evict, "no block may be evicted now"
        backed = self.backed.length
        blocks = self.backed.pop_all(min(count, backed)) if backed else []
        if backed < count:
            blocks += self.cached.pop_all(count - backed)
        contents, removed = self.contents, self.log.removed
        primary, copies, only = self.index.primary, self.index.copies, self.children.only
        for block in blocks:
            content = contents[block]
            digest, parent_hash, salt, _ = content
            if salt or digest in copies or only[parent_hash] != block:
                self._unpublish(block)
            else:  # what `_unpublish` does, where that concerns no other block, and fast
                del primary[digest], only[parent_hash]
                removed(content, block)
            contents[block] = NOTHING
        self.partial.difference_update(blocks)
        self.evictions += count
        return blocks

    def _free(self, block: int) -> None:
        self.contents[block] = NOTHING
        self.partial.discard(block)
        self.unfound.discard(block)
        self.num_sealed -= self.state[block] == SEALED
        self.num_quarantined -= self.state[block] == QUARANTINED
        self.state[block] = FREE
        self.free.append(block)
        self.changed.add(block)

    def _publish(self, block: int, content: Held) -> bool:
        """From now on the block is found. True if its parent has other children, too."""
        digest, parent_hash, salt, _ = content
        if self.index.add(digest, block):
            self.log.stored(content, block)
        if salt:
            self.of_salt.setdefault(salt, set()).add(block)
        return self.children.add(parent_hash + salt, block)

    def _unpublish(self, block: int) -> None:
        """From now on it is not; but a copy of it is, if there is one."""
        digest, parent_hash, salt, _ = content = self.contents[block]
        if self.index.remove(digest, block):
            self.log.removed(content, block)
        else:
            copy = self.index.find(digest)
            assert copy is not None
            self.log.stored(self.contents[copy], copy)
        self.children.remove(parent_hash + salt, block)
        if salt:
            found = self.of_salt[salt]
            found.remove(block)
            if not found:
                del self.of_salt[salt]

    def _is_covered(self, block: int) -> bool:
        return self.children.is_covered(self.parent_hash[block] + self.salt[block], block)
