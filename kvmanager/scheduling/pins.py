"""Pins: named holds on cached prefixes, each with a time to live, all together within a budget of blocks.

A pinned block has a holder, so nothing evicts it. What is pinned is not there for requests:
one that would not fit beside the pins is refused, and so is a pin beside which a request that is live now
would no longer fit.

A large pin takes its blocks in parts, and lets go of them in parts: see `pinning`, by which one is on its way
at a time. It is there, in every sense but that its blocks cannot be had, from `commit` to `remove`.
"""

from collections import Counter, deque
from collections.abc import Generator
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from kvmanager.pool.block_pool import NO_OWNER, BlockPool
from kvmanager.pool.hashing import HASH_BYTES, TOKEN_BYTES
from kvmanager.pool.ledger import Holder

if TYPE_CHECKING:
    from kvmanager.messages.pins import Pin, Unpin

PinKey = tuple[str, str]
"""Tenant and name: no two pins have the same."""


class SavedPin(NamedTuple):
    """What outlives the manager. `hashes` are those of the blocks, one after the other."""

    name: str
    expires_at: float  # seconds, of the clock that the core is given
    num_tokens: int
    hashes: bytes
    tenant: str = ""


class Fault(NamedTuple):
    """Why a Pin or an Unpin was refused: a wire code, and words with the numbers."""

    code: str
    message: str


Steps = Generator[int, None, Fault | None]
"""A command on pins, of which each step says how many blocks it was about."""


class Job(NamedTuple):
    """A command that is under way, or waits for its turn; without a message nobody asked for it."""

    client_id: int
    message: "Pin | Unpin | None"
    steps: Steps


class NamedPin(Holder):
    """A holder of the first blocks of a text; of the last of them perhaps only a part is of the text."""

    __slots__ = ("blocks", "expires_at", "hashes", "name", "num_tokens", "tenant")

    def __init__(self, name: str, expires_at: float, tenant: str = "") -> None:
        super().__init__(NO_OWNER)
        self.name = name
        self.tenant = tenant
        self.expires_at = expires_at  # seconds
        self.blocks: list[int] = []  # that it holds
        self.hashes = bytearray()  # of these
        self.num_tokens = 0

    @property
    def key(self) -> PinKey:
        return (self.tenant, self.name)

    def describe(self) -> str:
        return f"pin {self.name!r}"


class Pins:
    """All of them. `share` is the part of the pool that they may hold, `tenant_share` that of one tenant's:
    so none can leave nothing to the others.
    """

    __slots__ = (
        "by_key",
        "changes",
        "counts",
        "jobs",
        "moving",
        "now",
        "part",
        "share",
        "tenant_share",
        "total",
        "uses",
    )

    def __init__(self, share: float, tenant_share: float, part: int) -> None:
        self.share = share
        self.tenant_share = min(share, tenant_share)
        self.part = part  # blocks that are held or let go of at once
        self.by_key: dict[PinKey, NamedPin] = {}
        self.counts: Counter[str] = Counter()  # by tenant: blocks of the pins that are there
        self.total = 0  # of all tenants
        self.uses: Counter[int] = Counter()  # held block → by how many pins
        self.moving: NamedPin | None = None  # holds some of its blocks, but is not there yet, or no longer
        self.jobs: deque[Job] = deque()
        self.now = 0.0  # seconds; when the last part of one was done
        self.changes: dict[PinKey, SavedPin | None] = {}  # what is saved of these is no longer right

    def budget(self, pool: BlockPool, tenant: str = "") -> int:
        """Blocks that all pins may hold, or those of a tenant."""
        return int((self.tenant_share if tenant else self.share) * pool.num_blocks)

    def usable(self, pool: BlockPool) -> int:
        """Blocks that requests can have at most."""
        return pool.num_blocks - self.total

    def of(self, tenant: str) -> list[NamedPin]:
        """Those of a tenant; of none: all."""
        return [pin for pin in self.by_key.values() if tenant in ("", pin.tenant)]

    def holders(self) -> list[NamedPin]:
        """All that hold blocks."""
        return [*self.by_key.values(), *([] if self.moving is None else [self.moving])]

    def growth(self, key: PinKey, blocks: list[int], held: bool) -> int:
        """By how many blocks more would be pinned if a pin of these came, in place of that of its name.
        `held`: by it, so that it counts among those that use them.
        """
        new = list(map(self.uses.get, blocks, repeat(0))).count(int(held))
        old = self.by_key.get(key)
        if old is None:
            return new
        left = set(old.blocks).difference(blocks)
        return new - list(map(self.uses.__getitem__, left)).count(1)

    def hold(self, pool: BlockPool, pin: NamedPin, blocks: list[int]) -> None:
        """Some more of the pin's; it is on its way."""
        self.moving = pin
        for block in blocks:
            pool.hold(block, pin)
        self.uses.update(blocks)
        pin.blocks += blocks
        pin.hashes += b"".join([pool.contents[block][0] for block in blocks])

    def commit(self, pool: BlockPool, pin: NamedPin, growth: int) -> None:
        """It holds all of its blocks: now it is there. What it replaces is on its way out then."""
        self.counts[pin.tenant] += growth
        self.total += growth
        self.moving = self.by_key.pop(pin.key, None)
        self.by_key[pin.key] = pin
        self.changes[pin.key] = SavedPin(
            pin.name, pin.expires_at, pin.num_tokens, bytes(pin.hashes), pin.tenant
        )

    def remove(self, key: PinKey) -> None:
        """It is not there any more, and on its way out."""
        pin = self.moving = self.by_key.pop(key)
        alone = list(map(self.uses.__getitem__, pin.blocks)).count(1)
        self.counts[pin.tenant] -= alone
        self.total -= alone
        if not self.counts[pin.tenant]:
            del self.counts[pin.tenant]
        self.changes[key] = None

    def let_go(self, pool: BlockPool) -> Generator[int, None, None]:
        """Of what is on its way: the last block first, so that a chain's tail is evicted before its head."""
        pin = self.moving
        while pin is not None and pin.blocks:
            part = pin.blocks[: -self.part - 1 : -1]
            del pin.blocks[-self.part :]
            pool.release_all(part, pin)
            self.uses.subtract(part)
            for block in part:
                if not self.uses[block]:
                    del self.uses[block]
            yield len(part)
        self.moving = None

    def restore(self, pool: BlockPool, saved: list[SavedPin], now: float) -> None:
        """At start: pin again what is still there, in the order of `saved` for as long as the budget allows.

        Must come before anything else is held.
        """
        for each in saved:
            pin = NamedPin(each.name, each.expires_at, each.tenant)
            blocks = _chain(pool, each.hashes)
            held = sum(len(pool.tokens[block]) // TOKEN_BYTES for block in blocks)
            pin.num_tokens = min(each.num_tokens, held)
            growth = self.growth(pin.key, blocks, held=False)
            if blocks and each.expires_at > now and not self.beyond_budget(pool, pin.tenant, growth):
                self.hold(pool, pin, blocks)
                self.commit(pool, pin, growth)
            else:
                self.changes[pin.key] = None

    def beyond_budget(self, pool: BlockPool, tenant: str, growth: int) -> str:
        """Why so many more would be too much, or an empty string; a tenant is told no number of others'."""
        less = "remove a pin, or pin fewer tokens"
        own, budget = self.counts[tenant] + growth, self.budget(pool, tenant)
        if tenant and own > budget:
            return f"would make {own}, and tenant_pin_budget allows {budget} of {pool.num_blocks}; {less}"
        total, budget = self.total + growth, self.budget(pool)
        if total <= budget:
            return ""
        if tenant:
            return "are not to be had, as pin_budget is used up; try again later"
        return (
            f"would make {total} pinned blocks, and pin_budget allows {budget} of {pool.num_blocks}; {less}"
        )


def _chain(pool: BlockPool, hashes: bytes) -> list[int]:
    """The blocks with these hashes, as far as each follows the one before; only the last may be partial."""
    blocks: list[int] = []
    parent = pool.root
    for start in range(0, len(hashes), HASH_BYTES):
        digest = hashes[start : start + HASH_BYTES]
        block = pool.index.find(digest)
        if block is None or pool.parent_hash[block] != parent:
            break
        blocks.append(block)
        if pool.is_partial(block):
            break
        parent = digest
    return blocks
