"""The pool and the tier below it: which blocks are copied down before they are evicted, and which are copied
back for a request that waits.

Down: while fewer than half of the pool's blocks are free or *backed* (cached, and in the tier as well), the
cached blocks nearest to eviction are copied, each held by the copy meanwhile. Backed blocks are evicted
first. A partial block counts as backed without a copy: it holds less than a block of work. When blocks are
scarce nothing waits for a copy: what is not backed is evicted all the same.

Up: a request whose next blocks are in the tier gets blocks for them, and starts when they are filled, or
after `MAX_WAIT` without them. A block is found only after its copy's checksum was good.
"""

from typing import NamedTuple

from kvmanager.asking.event_log import NOBODY, Asker
from kvmanager.pool.block_pool import NO_OWNER, BlockPool
from kvmanager.pool.hashing import Content
from kvmanager.pool.ledger import Holder
from kvmanager.scheduling.requests import Request
from kvmanager.tier.tiers import Copy, Tier

MAX_WAIT = 2.0  # seconds that a request waits for its copies
COPY_PATIENCE = 1.0  # seconds for which blocks that are being demoted count as coming back
RESUME_CHOICES = ("auto", "promote", "recompute")


class Demoter(Holder):
    """Holds the blocks that are being copied down."""

    __slots__ = ()

    def describe(self) -> str:
        return "copies to the disk tier"


class Comeback(Holder):
    """Holds what a waiting request will start with: blocks that were found, and those being filled."""

    __slots__ = ("began_at", "blocks", "pending")

    def __init__(self, now: float) -> None:
        super().__init__(NO_OWNER)
        self.began_at = now  # seconds
        self.blocks: list[int] = []
        self.pending = 0  # copies

    def describe(self) -> str:
        return f"copies of {self.pending} blocks from the disk tier"


class Copies(NamedTuple):
    """What a request waits for: `missing` are hashes of blocks that the tier has and the pool lacks, `found`
    all blocks that are in the pool before, between and behind them.
    """

    missing: list[bytes]
    found: list[int]


class Tiering:
    """`resume`: "auto" copies back what is cheaper to copy than to compute, "promote" everything;
    "recompute" is "auto" but for preempted requests, which get nothing.
    """

    __slots__ = ("_last_demotion", "comebacks", "demoter", "demotions", "promotions", "resume", "tier")

    def __init__(self, tier: Tier, resume: str = "auto") -> None:
        assert resume in RESUME_CHOICES
        self.tier = tier
        self.resume = resume
        self.demoter = Demoter(NO_OWNER)
        self.comebacks: dict[bytes, Comeback] = {}  # by the hash of each block on its way
        self.demotions: list[Copy] = []  # decided on and not yet carried out
        self.promotions: list[Copy] = []
        self._last_demotion = 0.0

    # --- down -------------------------------------------------------------------------------------------

    def demote_ahead(self, pool: BlockPool, now: float) -> None:
        """Begin as many copies as are wanted and possible."""
        tier, wanted, scarce = self.tier, pool.num_blocks // 2, pool.num_blocks // 8
        while pool.cached and pool.available > scarce:
            if len(pool.free) + len(pool.backed) + len(tier.demoting) >= wanted:
                return
            block = pool.cached.first
            if not pool.is_partial(block) and pool.block_hash[block] not in tier:
                copy = tier.demote(block, Content(*pool.contents[block]), now)
                if copy is None:
                    return
                pool.hold(block, self.demoter)
                self.demotions.append(copy)
                self._last_demotion = now
            else:
                pool.set_aside(block)

    def demoted(self, pool: BlockPool, copy: Copy, good: bool, now: float) -> None:
        """A copy down is over: unless somebody uses the block again, it is among the next to be evicted."""
        self.tier.demoted(copy, good, now)
        pool.release(copy.block, self.demoter)
        if copy.block in pool.cached:
            pool.set_aside(copy.block)

    def blocks_return(self, now: float) -> bool:
        """Whether blocks in use will be evictable in a moment, when their copy is done."""
        return bool(self.tier.demoting) and now - self._last_demotion < COPY_PATIENCE

    def take(self) -> tuple[list[Copy], list[Copy]]:
        """Demotions and promotions to carry out now."""
        taken = (self.demotions, self.promotions)
        self.demotions, self.promotions = [], []
        return taken

    # --- up ---------------------------------------------------------------------------------------------

    def copies_for(
        self, pool: BlockPool, request: Request, hits: list[list[int]], now: float
    ) -> Copies | None:
        """What `request`, for which there is room, shall wait for from the tier; None: for nothing. `hits`:
        what each of its groups finds in the pool. Changes nothing.
        """
        if not request.reads_cache:
            return None
        copies = self._missing(pool, request, hits)
        if request.copies_until is None:
            worth_it = copies.missing and self._worth_it(request, len(copies.missing), pool.block_size, now)
            return copies if worth_it else None
        under_way = any(digest in self.tier.promoting for digest in copies.missing)
        return copies if under_way and now < request.copies_until else None

    def promoted(self, pool: BlockPool, copy: Copy, good: bool, seconds: float, now: float) -> None:
        """A copy up is over: the block is content if it went well, else it is free."""
        good = self.tier.promoted(copy, good, seconds, now)
        comeback = self.comebacks.pop(copy.content.block_hash)
        if good:
            pool.seal(copy.block, copy.content, now)
        else:
            comeback.blocks.remove(copy.block)
            pool.release(copy.block, comeback)
        comeback.pending -= 1
        while not comeback.pending and comeback.blocks:
            pool.release(comeback.blocks.pop(), comeback)

    def _missing(self, pool: BlockPool, request: Request, hits: list[list[int]]) -> Copies:
        looks = [
            group.beyond(pool, self.tier, request.salt, len(blocks))
            for group, blocks in zip(request.groups, hits, strict=True)
        ]
        missing = [digest for _, missed in looks for digest in missed]
        if not missing:
            return Copies([], [])  # what is found may be much, and is of no use then
        found = [block for blocks, (more, _) in zip(hits, looks, strict=True) for block in (*blocks, *more)]
        if len(looks) == 1:  # then none is named twice, and they may be many
            return Copies(missing, found)
        return Copies(list(dict.fromkeys(missing)), list(dict.fromkeys(found)))

    def _worth_it(self, request: Request, num_blocks: int, block_size: int, now: float) -> bool:
        if any(now - comeback.began_at >= MAX_WAIT for comeback in self.comebacks.values()):
            return False  # the disk hangs: blocks given to it would not come back either
        if self.resume == "promote":
            return True
        if self.resume == "recompute" and request.preemptions:
            return False
        return self.tier.copy_is_cheaper(num_blocks, num_blocks * block_size, now)

    def begin(self, pool: BlockPool, request: Request, copies: Copies, now: float) -> None:
        """`request` waits for these: begin those that are not under way. Hold what was found, then grant
        blocks for the rest: so none of it is evicted for them.
        """
        if request.copies_until is not None:
            return
        request.copies_until = now + MAX_WAIT
        request.promoted = len(copies.missing)
        wanted = [digest for digest in copies.missing if digest not in self.tier.promoting]
        if not wanted:
            return
        comeback = Comeback(now)
        for block in copies.found:
            pool.hold(block, comeback)
            comeback.blocks.append(block)
        pool.log.asker = Asker(request.submit.request_id, request.salt)
        for digest in wanted:
            block = pool.grant(comeback)
            comeback.blocks.append(block)
            comeback.pending += 1
            self.comebacks[digest] = comeback
            self.promotions.append(self.tier.promote(digest, block))
        pool.log.asker = NOBODY
