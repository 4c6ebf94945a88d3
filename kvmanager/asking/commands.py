"""Evict and Clear: forgetting what is cached, a slice at a time.

A command is a walk over blocks. What one message does of it is bounded; the walk is kept until the same
command comes again, and goes on there. A forced Clear first takes from every running sequence its last sealed
block out of what is found: whatever it seals from then on follows that one, and is not found either. Pins of
its scope end.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import eq

import msgspec

from kvmanager.asking.holders import holders
from kvmanager.pool.block_pool import SEALED, BlockPool
from kvmanager.pool.block_walks import Step, forget_prefix, forget_salts
from kvmanager.pool.hashing import salt_digest, tenant_bytes
from kvmanager.protocol import Clear, Cleared, Evict, HolderInfo
from kvmanager.scheduling.clients import Frontend
from kvmanager.state import State, Sweep

MAX_COST = 1024  # of one message
COSTS: dict[Step, int] = {"look": 1, "evicted": 8, "in_use": 8}
MAX_SWEEPS = 16
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
    key = (frontend.client_id, msgspec.structs.replace(message, query_id=0))
    sweep = state.sweeps.pop(key, None) or begin(state, pool, message)
    pool.log.cause = "clear" if isinstance(message, Clear) else "evict"
    more = go_on(sweep)
    if more:
        state.sweeps[key] = sweep
        if len(state.sweeps) > MAX_SWEEPS:
            state.sweeps.popitem(last=False)
    elif isinstance(message, Clear) and not message.tenant and nothing_is_found(state, pool):
        pool.log.cleared()
    pool.log.cause = "capacity"
    state.admission_due = True
    return Cleared(message.query_id, state.at(message.tenant), sweep.evicted, sweep.in_use, more=more)


def go_on(sweep: Sweep) -> bool:
    """A slice of it. True if there may be more."""
    sweep.evicted = cost = 0
    for step in sweep.steps:
        sweep.evicted += step == "evicted"
        sweep.in_use += step == "in_use"
        cost += COSTS[step]
        if cost >= MAX_COST:
            return True
    return False


def begin(state: State, pool: BlockPool, message: Evict | Clear) -> Sweep:
    tier = state.tiering.tier if state.tiering is not None else None
    prefix = tenant_bytes(message.tenant)
    if isinstance(message, Clear):
        let_go = unfind_last(state, pool, message.tenant) if message.force else 0
        steps = forget_salts(pool, tier, lambda salt: salt.startswith(prefix), message.force)
        return Sweep(steps, in_use=let_go)
    salt = salt_digest(message.cache_salt, message.tenant)
    if message.token_ids:
        return Sweep(forget_prefix(pool, tier, salt, message.token_ids))
    if message.all_salts and not message.cache_salt:
        return Sweep(forget_salts(pool, tier, lambda each: each.startswith(prefix), False))
    return Sweep(forget_salts(pool, tier, partial(eq, salt), False))


def unfind_last(state: State, pool: BlockPool, tenant: str) -> int:
    """Prepare a forced Clear. Returns how many blocks in use are found no more by that."""
    pool.log.cause = "clear"
    for pin in state.pins.of(tenant):
        state.pins.remove(pool, pin.key)
    unfound = 0
    for sequence in state.sequences(tenant):
        if not sequence.num_sealed:
            continue
        if state.in_flight.withdraw(sequence):
            state.admission_due = True
        last = sequence.table[sequence.num_sealed - 1]
        if last not in pool.unfound:
            pool.unfind(last)
            unfound += 1
    return unfound


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
    tables = [sequence.table[: sequence.num_sealed] for sequence in state.sequences(message.tenant)]
    tables += [[each.source] for each in state.sequences(message.tenant) if each.source is not None]
    tables += [pin.blocks for pin in state.pins.of(message.tenant)]
    tables += [each.blocks for each in state.quarantines.values() if not message.tenant]
    in_use = len(set().union(*tables))
    return Cleared(
        message.query_id,
        state.at(message.tenant),
        in_use=in_use,
        blockers=blockers,
        code="in_use",
        message=f"{in_use} cached blocks are in use; wait until those who hold them have ended, or force it",
    )


def nothing_is_found(state: State, pool: BlockPool) -> bool:
    return not len(pool.index) and (state.tiering is None or not len(state.tiering.tier))
