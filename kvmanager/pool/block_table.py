"""A running sequence as the manager sees it: its tokens so far as reported, its block table, and what is
sealed of it.
"""

from array import array

from kvmanager.pool.block_pool import SEALED, BlockPool
from kvmanager.pool.hashing import Held, content
from kvmanager.pool.ledger import Holder


class Sequence(Holder):
    """One token stream of a started request. `table[i]` holds tokens [i·block_size, (i+1)·block_size).

    Blocks before `num_sealed` are sealed, the others are being written by the runner alone. `source` is the
    block whose first tokens the runner is to copy into the first of those; it is held until that is done.
    """

    __slots__ = (
        "advanced_at",
        "announced",
        "choice",
        "forked",
        "last_hash",
        "max_length",
        "num_cached",
        "num_computed",
        "num_given",
        "num_reused",
        "num_sealed",
        "num_settled",
        "pending_forks",
        "request_id",
        "salt",
        "source",
        "start_id",
        "table",
        "tokens",
    )

    def __init__(
        self,
        owner_tag: bytes,
        start_id: int,
        choice: int,
        tokens: "array[int]",
        salt: bytes,
        root: bytes,
        pending_forks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(owner_tag)
        self.start_id = start_id
        self.choice = choice
        self.request_id = ""
        self.tokens = tokens
        self.salt = salt
        self.table: list[int] = []
        self.num_sealed = 0  # blocks
        self.num_reused = 0  # blocks at the table's beginning that others may hold as well
        self.max_length = len(tokens)  # tokens
        self.num_given = len(tokens)  # tokens, of which the first `num_cached` were there when it started
        self.num_cached = 0
        self.num_computed = 0  # tokens
        self.last_hash = root  # of block num_sealed - 1
        self.pending_forks = pending_forks
        self.source: int | None = None
        self.announced: list[Held] = []  # the full blocks of the tokens that it was given
        self.num_settled = 0  # of those, how many nobody may wait for any more
        self.advanced_at = 0.0  # seconds
        self.forked = False  # another sequence was forked from this one, or this one from another

    def describe(self) -> str:
        return f"sequence {self.choice} of start {self.start_id}"

    def reuse(self, pool: BlockPool, hits: list[int]) -> None:
        """Begin the table with sealed blocks that hold the first tokens."""
        assert not self.table
        state, add = pool.state, pool.ledger.add
        for block in hits:
            if state[block] == SEALED:  # in use, as most of them are
                add(block, self)
            else:
                pool.hold(block, self)
            pool.hits[block] += 1
        self.table += hits
        if hits:
            self.last_hash = pool.block_hash[hits[-1]]
        self.num_sealed = self.num_reused = len(self.table)
        self.num_computed = self.num_sealed * pool.block_size

    def copy_from(self, pool: BlockPool, source: int, num_tokens: int) -> None:
        """Take this many tokens more from a block that shares only them."""
        pool.hold(source, self)
        pool.hits[source] += 1
        self.source = source
        self.num_computed += num_tokens

    def copied(self, pool: BlockPool) -> None:
        """The runner has copied from `source`."""
        assert self.source is not None
        pool.release(self.source, self)
        self.source = None

    def grow(self, pool: BlockPool, num_blocks: int) -> None:
        """Grant fresh blocks until the table has `num_blocks`."""
        self.table += pool.grant_all(num_blocks - len(self.table), self)

    def seal(self, pool: BlockPool, now: float) -> None:
        """The runner has written the KV of the tokens up to `num_computed`: seal the blocks that are full."""
        self.advanced_at = now
        size = pool.block_size
        end = self.num_computed // size
        if end == self.num_sealed:
            return
        table, known, digest = self.table, self.announced, self.last_hash
        seal = pool.seal
        if pool.unfound and self.num_sealed and table[self.num_sealed - 1] in pool.unfound:
            seal = pool.seal_unfound
        for index in range(self.num_sealed, end):
            if index < len(known):
                held = known[index]
            else:
                start = index * size
                held = content(digest, self.tokens[start : start + size].tobytes(), self.salt)
            seal(table[index], held, now)
            digest = held[0]
        self.num_sealed, self.last_hash = end, digest

    def fork(self, choice: int) -> "Sequence":
        """A sequence with the same table and the same tokens, as far as they were reported. To be followed by
        its `share`.
        """
        child = Sequence(self.owner_tag, self.start_id, choice, self.tokens[:], self.salt, self.last_hash)
        child.table = self.table[:]
        child.request_id = self.request_id
        child.num_reused = len(self.table)
        child.num_computed = self.num_computed
        child.max_length = self.max_length
        self.forked = child.forked = True
        return child

    def share(self, pool: BlockPool, parent: "Sequence") -> None:
        """Hold all blocks that `parent`, from which this was forked, has sealed or is writing."""
        for block in self.table:
            pool.hold(block, self)
        self.num_sealed, self.last_hash = parent.num_sealed, parent.last_hash

    def seal_tail(self, pool: BlockPool, now: float) -> None:
        """The runner no longer writes: seal what there is of a block, unless others go on writing there, or
        its beginning was not copied, or nobody would find it.
        """
        start = self.num_sealed * pool.block_size
        if start == self.num_computed or self.source is not None:
            return
        block = self.table[self.num_sealed]
        if self.num_sealed and self.table[self.num_sealed - 1] in pool.unfound:
            return
        if pool.ledger.ref_count(block) == 1:
            tokens = self.tokens[start : self.num_computed].tobytes()
            pool.seal_tail(block, content(self.last_hash, tokens, self.salt), now)

    def release(self, pool: BlockPool) -> None:
        """Let go of every block, the last one first: so a chain is evicted from its tail."""
        if self.source is not None:
            self.copied(pool)
        pool.release_all(reversed(self.table), self)
        self.table.clear()
