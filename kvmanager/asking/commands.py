"""Evict and Clear: forgetting what is cached, a slice at a time.

A command is a walk over blocks. What one message does of it is bounded; the walk is kept until the same
command comes again, and goes on there. A forced Clear first takes from every running sequence its last sealed
block out of what is found: whatever it seals from then on follows that one, and is not found either. Pins of
its scope end.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from operator import eq

import msgspec

from kvmanager.asking import long_text, pinning
from kvmanager.asking.holders import holders
from kvmanager.pool.block_pool import SEALED, BlockPool
from kvmanager.pool.block_walks import Step, forget_prefix, forget_salts
from kvmanager.pool.hashing import salt_digest, tenant_bytes
from kvmanager.protocol import MAX_COUNTED, Clear, Cleared, Evict, HolderInfo
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.pins import Job
from kvmanager.state import State

MAX_COST = 512  # of one message
COSTS: dict[Step, int] = {"look": 1, "evicted": 8, "in_use": 8, "pause": MAX_COST}
MAX_SWEEPS = 16  # of a frontend
MAX_BLOCKERS = 64  # that are told


def command(state: State, frontend: Frontend, message: Evict | Clear, now: float) -> Cleared:
    """Do a part of it, or say why not."""
    pool = state.pool
    if pool is None:
        return Cleared(message.query_id, state.at(message.tenant))
    if not pool.may_evict:
        text = "processes of an earlier start may still read any block; try again when they are connected"
        return Cleared(message.query_id, state.at(message.tenant), code="not_ready", message=text)
    if isinstance(message, Clear) and not message.force:
        blockers = tuple(islice(blocking(state, pool, now, message.tenant), MAX_BLOCKERS))
        if blockers:
            return refusal(state, pool, message, blockers)
    key = msgspec.structs.replace(message, query_id=0)
    short = b""
    if isinstance(message, Evict) and message.token_ids:
        asked = long_text.of_command(state, frontend, message, pool)
        full = asked.blocks(pool, asked.salt)
        if full:
            key = msgspec.structs.replace(key, token_ids=(), start=0, prefix=full[-1][0])
        else:
            short = asked.tokens.tobytes()
    sweep = frontend.sweeps.pop(key, None) or Sweep(begin(state, pool, key, short))
    pool.log.cause = "clear" if isinstance(message, Clear) else "evict"
    more = sweep.go_on()
    if more:
        frontend.sweeps[key] = sweep
        if len(frontend.sweeps) > MAX_SWEEPS:
            frontend.sweeps.popitem(last=False)
    elif isinstance(message, Clear) and not message.tenant and nothing_is_found(state, pool):
        pool.log.cleared()
    pool.log.cause = "capacity"
    state.admission_due = True
    return Cleared(
        message.query_id,
        state.at(message.tenant),
        sweep.evicted,
        sweep.in_use,
        more=more,
        prefix=key.prefix if isinstance(key, Evict) else b"",
    )


class Sweep:
    """A command that forgets what is cached, part of the way."""

    __slots__ = ("_steps", "evicted", "in_use")

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self.evicted = 0  # blocks, by the last message
        self.in_use = 0  # blocks that stayed, so far

    def go_on(self) -> bool:
        """A slice of it. True if there may be more."""
        self.evicted = cost = 0
        for step in self._steps:
            self.evicted += step == "evicted"
            self.in_use += step == "in_use"
            cost += COSTS[step]
            if cost >= MAX_COST:
                return True
        return False


def begin(state: State, pool: BlockPool, message: Evict | Clear, short: bytes) -> Iterator[Step]:
    """`short`: the packed tokens of a text of less than a block."""
    tier = state.tiering.tier if state.tiering is not None else None
    prefix = tenant_bytes(message.tenant)
    if isinstance(message, Clear):
        steps = forget_salts(pool, tier, lambda salt: salt.startswith(prefix), message.force)
        return chain(let_go(state, pool, message.tenant), steps) if message.force else steps
    salt = salt_digest(message.cache_salt, message.tenant)
    if message.prefix or short:
        return forget_prefix(pool, tier, salt, message.prefix, short)
    if message.all_salts and not message.cache_salt:
        return forget_salts(pool, tier, lambda each: each.startswith(prefix), False)
    return forget_salts(pool, tier, partial(eq, salt), False)


def let_go(state: State, pool: BlockPool, tenant: str) -> Iterator[Step]:
    """What comes first in a forced Clear: pins end, and running sequences seal nothing more that is found."""
    if state.pins.of(tenant) or state.pins.jobs:
        job = Job(0, None, pinning.end_pins(state, tenant))
        state.pins.jobs.append(job)
        while job in state.pins.jobs:
            yield "pause"
    for sequence in state.sequences(tenant):
        if not 0 < sequence.num_sealed <= len(sequence.table):
            continue  # it has sealed nothing, or ended meanwhile
        last = sequence.table[sequence.num_sealed - 1]
        if state.in_flight.withdraw(sequence):
            state.admission_due = True
        if last not in pool.unfound:
            pool.unfind(last)
            yield "in_use"


def blocking(state: State, pool: BlockPool, now: float, tenant: str) -> Iterator[HolderInfo]:
    """Who uses anything that is cached. Copies do not count: they are over in a moment."""
    content = {
        quarantine.lock
        for quarantine in state.quarantines.values()
        if any(pool.state[block] == SEALED for block in quarantine.blocks)
    }
    computing = {
        (sequence.request_id, sequence.choice)
        for sequence in state.sequences(tenant)
        if not sequence.num_sealed and sequence.source is None
    }
    for holder in holders(state, now, tenant):
        match holder.kind:
            case "pin":
                yield holder
            case "quarantine" if holder.name in content:
                yield holder
            case "sequence" if (holder.name, holder.choice) not in computing:
                yield holder


def refusal(state: State, pool: BlockPool, message: Clear, blockers: tuple[HolderInfo, ...]) -> Cleared:
    in_use = len(set(islice(chain.from_iterable(used(state, message.tenant)), MAX_COUNTED)))
    return Cleared(
        message.query_id,
        state.at(message.tenant),
        in_use=in_use,
        blockers=blockers,
        code="in_use",
        message=f"{in_use} cached blocks are in use; wait until those who hold them have ended, or force it",
    )


def used(state: State, tenant: str) -> Iterator[Iterable[int]]:
    """Cached blocks of whoever holds some; one of several holders comes several times."""
    for sequence in state.sequences(tenant):
        yield islice(sequence.table, sequence.num_sealed)
        if sequence.source is not None:
            yield [sequence.source]
    for pin in state.pins.holders():
        if tenant in ("", pin.tenant):
            yield pin.blocks
    for quarantine in state.quarantines.values() if not tenant else ():
        yield quarantine.blocks


def nothing_is_found(state: State, pool: BlockPool) -> bool:
    return not len(pool.index) and (state.tiering is None or not len(state.tiering.tier))
