"""Pins: named holds on cached prefixes, each with a time to live, all together within a budget of blocks.

A pinned block has a holder, so nothing evicts it. What is pinned is not there for requests:
one that would not fit beside the pins is refused, and so is a pin beside which a request that is live now
would no longer fit.
"""

from collections import Counter
from typing import NamedTuple

from kvmanager.messages.pins import Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from kvmanager.pool.block_pool import NO_OWNER, BlockPool
from kvmanager.pool.hashing import TOKEN_BYTES, salt_digest, token_array
from kvmanager.pool.ledger import Holder
from kvmanager.scheduling.requests import Group

MAX_PINS = 1024
MAX_TENANT_PINS = 64
MAX_NAME_CHARS = 128
MAX_TTL = 366 * 86400.0  # seconds


class SavedPin(NamedTuple):
    """What outlives the manager. `hashes` are those of the blocks, in order."""

    name: str
    expires_at: float  # seconds, of the clock that the core is given
    num_tokens: int
    hashes: tuple[bytes, ...]
    tenant: str = ""


class NamedPin(Holder):
    """A holder of the first blocks of a text; of the last of them perhaps only a part is of the text."""

    __slots__ = ("blocks", "expires_at", "name", "num_tokens", "tenant")

    def __init__(
        self, name: str, expires_at: float, blocks: list[int], num_tokens: int, tenant: str = ""
    ) -> None:
        super().__init__(NO_OWNER)
        self.name = name
        self.tenant = tenant
        self.expires_at = expires_at  # seconds
        self.blocks = blocks
        self.num_tokens = num_tokens

    @property
    def key(self) -> tuple[str, str]:
        """No two pins have the same: names are per tenant."""
        return (self.tenant, self.name)

    def describe(self) -> str:
        return f"pin {self.name!r}"


class Pins:
    """All of them. `share` is the part of the pool that they may hold, `tenant_share` that of one tenant's:
    so none can leave nothing to the others.
    """

    __slots__ = ("by_name", "changed", "share", "tenant_share", "uses")

    def __init__(self, share: float, tenant_share: float) -> None:
        self.share = share
        self.tenant_share = min(share, tenant_share)
        self.by_name: dict[tuple[str, str], NamedPin] = {}  # by tenant and name
        self.uses: Counter[int] = Counter()  # pinned block → by how many pins
        self.changed = False  # what is saved is no longer right

    def budget(self, pool: BlockPool, tenant: str = "") -> int:
        """Blocks that all pins may hold, or those of a tenant."""
        return int((self.tenant_share if tenant else self.share) * pool.num_blocks)

    def usable(self, pool: BlockPool) -> int:
        """Blocks that requests can have at most."""
        return pool.num_blocks - len(self.uses)

    def blocks_with(self, pin: NamedPin) -> int:
        """How many blocks would be pinned if `pin` came, in place of that of its name."""
        old = self.by_name.get(pin.key)
        left = self.uses - Counter(old.blocks) if old is not None else self.uses
        return len(left.keys() | set(pin.blocks))

    def own_blocks_with(self, pin: NamedPin) -> int:
        """How many of them would be pinned by pins of its tenant."""
        others = [each.blocks for each in self.of(pin.tenant) if each.key != pin.key]
        return len(set(pin.blocks).union(*others))

    def add(self, pool: BlockPool, pin: NamedPin) -> None:
        """Hold its blocks first, then let go of what it replaces."""
        for block in pin.blocks:
            pool.hold(block, pin)
        self.uses.update(pin.blocks)
        if pin.key in self.by_name:
            self.remove(pool, pin.key)
        self.by_name[pin.key] = pin
        self.changed = True

    def of(self, tenant: str) -> list[NamedPin]:
        """Those of a tenant; of none: all."""
        return [pin for pin in self.by_name.values() if tenant in ("", pin.tenant)]

    def remove(self, pool: BlockPool, key: tuple[str, str]) -> None:
        """The last block first, so that a chain's tail is evicted before its head."""
        pin = self.by_name.pop(key)
        for block in reversed(pin.blocks):
            pool.release(block, pin)
            self.uses[block] -= 1
            if not self.uses[block]:
                del self.uses[block]
        self.changed = True

    def expire(self, pool: BlockPool, now: float) -> None:
        """Let go of those whose time is over."""
        over = [pin.key for pin in self.by_name.values() if pin.expires_at <= now]
        for key in over:
            self.remove(pool, key)

    def saved(self, pool: BlockPool) -> list[SavedPin]:
        """What `restore` needs."""
        return [
            SavedPin(
                pin.name,
                pin.expires_at,
                pin.num_tokens,
                tuple(pool.block_hash[block] for block in pin.blocks),
                pin.tenant,
            )
            for pin in self.by_name.values()
        ]

    def restore(self, pool: BlockPool, saved: list[SavedPin], now: float) -> None:
        """At start: pin again what is still there, in the order of `saved` for as long as the budget allows.

        Must come before anything else is held. What is not restored has to be saved away: `changed`.
        """
        for each in saved:
            blocks = _chain(pool, each.hashes)
            held = sum(len(pool.tokens[block]) // TOKEN_BYTES for block in blocks)
            tokens = min(each.num_tokens, held)
            pin = NamedPin(each.name, each.expires_at, blocks, tokens, each.tenant)
            if blocks and each.expires_at > now and not self._beyond_budget(pool, pin):
                self.add(pool, pin)
        self.changed = bool(saved)

    def answer(
        self, pool: BlockPool | None, message: Pin | Unpin | PinsQuery, now: float, fault: "Fault | None"
    ) -> PinsAnswer:
        """The tenant's pins by name, and why the message was refused. A query for no tenant is for all."""
        every = isinstance(message, PinsQuery) and not message.tenant
        listed = [pin for pin in self.by_name.values() if every or pin.tenant == message.tenant]
        pins = sorted(listed, key=lambda pin: pin.name)
        uses = self.uses if not message.tenant else {block for pin in pins for block in pin.blocks}
        return PinsAnswer(
            message.query_id,
            tuple(
                Pinned(
                    pin.name,
                    len(pin.blocks),
                    pin.num_tokens,
                    pin.expires_at - now,
                    pin.tenant if every else "",
                )
                for pin in pins
            ),
            len(uses),
            self.budget(pool, message.tenant) if pool else 0,
            fault.code if fault else "",
            fault.message if fault else "",
        )

    def apply(
        self, pool: BlockPool | None, message: Pin | Unpin | PinsQuery, largest_request: int, now: float
    ) -> "Fault | None":
        """Do what is asked, or say why not. `largest_request`: blocks that a live request may need."""
        match message:
            case Pin():
                if pool is None:
                    return Fault("not_ready", "there is no block pool yet: no runner has come")
                return self._pin(pool, message, largest_request, now)
            case Unpin():
                if pool is None or (message.tenant, message.name) not in self.by_name:
                    return Fault("not_found", f"there is no pin {message.name[:MAX_NAME_CHARS]!r}")
                self.remove(pool, (message.tenant, message.name))
        return None

    def _pin(self, pool: BlockPool, message: Pin, largest_request: int, now: float) -> "Fault | None":
        if (wrong := _why_malformed(message)) is not None:
            return Fault("invalid_request", wrong)
        own, most = self.of(message.tenant), MAX_TENANT_PINS if message.tenant else MAX_PINS
        if (message.tenant, message.name) not in self.by_name and len(own) >= most:
            return Fault("pin_budget", f"there are {most} pins already; remove one first")
        pin = find(pool, message, now)
        if not pin.blocks:
            return Fault(
                "not_cached",
                f"nothing of these {len(message.token_ids)} tokens is cached under this salt; "
                "send them as a request once, then pin them",
            )
        if beyond := self._beyond_budget(pool, pin):
            return Fault("pin_budget", f"{len(pin.blocks)} blocks for pin {pin.name!r} {beyond}")
        total = self.blocks_with(pin)
        if largest_request > pool.num_blocks - total:
            needs = (
                f"a request that is live now may need {largest_request} blocks, and beside {total} pinned "
            )
            left = f"ones {pool.num_blocks - total} of {pool.num_blocks} would be left; "
            reason = "not enough would be left for what runs now; " if message.tenant else needs + left
            return Fault("pin_busy", f"{reason}try again when it has ended")
        self.add(pool, pin)
        return None

    def _beyond_budget(self, pool: BlockPool, pin: NamedPin) -> str:
        """Why the pin would be too much, or an empty string; a tenant is told no number of others'."""
        less = "remove a pin, or pin fewer tokens"
        own, budget = self.own_blocks_with(pin), self.budget(pool, pin.tenant)
        if pin.tenant and own > budget:
            return f"would make {own}, and tenant_pin_budget allows {budget} of {pool.num_blocks}; {less}"
        total, budget = self.blocks_with(pin), self.budget(pool)
        if total <= budget:
            return ""
        if pin.tenant:
            return "are not to be had, as pin_budget is used up; try again later"
        return (
            f"would make {total} pinned blocks, and pin_budget allows {budget} of {pool.num_blocks}; {less}"
        )


class Fault(NamedTuple):
    """Why a Pin or an Unpin was refused: a wire code, and words with the numbers."""

    code: str
    message: str


def find(pool: BlockPool, message: Pin, now: float) -> NamedPin:
    """The longest prefix that is cached, of which no block is held yet by this pin."""
    # A lookup leaves the last token to be computed: one more is given, so that it looks for all of these.
    group = Group(token_array(message.token_ids), (0,), (0,))
    found = group.lookup(pool, salt_digest(message.cache_salt, message.tenant))
    blocks = [*found.blocks, found.source] if found.num_shared else found.blocks
    num_tokens = len(found.blocks) * pool.block_size + found.num_shared
    return NamedPin(message.name, now + message.ttl, blocks, num_tokens, message.tenant)


def _why_malformed(message: Pin) -> str | None:
    if not 1 <= len(message.name) <= MAX_NAME_CHARS:
        return f"a pin's name has {len(message.name)} characters; want 1 to {MAX_NAME_CHARS}"
    if not 0 < message.ttl <= MAX_TTL:
        return f"a pin's ttl is {message.ttl} seconds; want more than 0, at most {MAX_TTL:g}"
    if not all(0 <= token < 1 << 32 for token in message.token_ids):
        return "a pin's token ids must be from 0 to 2**32-1"
    return None


def _chain(pool: BlockPool, hashes: tuple[bytes, ...]) -> list[int]:
    """The blocks with these hashes, as far as each follows the one before; only the last may be partial."""
    blocks: list[int] = []
    parent = pool.root
    for digest in hashes:
        block = pool.index.find(digest)
        if block is None or pool.parent_hash[block] != parent:
            break
        blocks.append(block)
        if pool.is_partial(block):
            break
        parent = digest
    return blocks
