"""Who holds blocks and why: the processes, and everyone whose hold keeps a block in use."""

from collections.abc import Iterator
from itertools import islice

import msgspec

from kvmanager.asking.explain import told
from kvmanager.pool.block_pool import STATE_NAMES, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import tenant_bytes
from kvmanager.pool.ledger import Holder
from kvmanager.protocol import (
    MAX_PAGE,
    BlockDetail,
    BlockQuery,
    HolderInfo,
    HoldersAnswer,
    HoldersQuery,
    ProcessInfo,
    own_number,
)
from kvmanager.scheduling.clients import Frontend, Quarantine, Runner
from kvmanager.scheduling.pins import NamedPin
from kvmanager.state import State

STUCK_AFTER = 10.0  # seconds of silence: a process that is well says something several times per second
MAX_WALK = 4096  # blocks looked at for one answer


def holders_answer(state: State, query: HoldersQuery, now: float) -> HoldersAnswer:
    """A tenant is told of its own sequences and pins, and of no process."""
    found = sorted(holders(state, now, query.tenant), key=lambda each: -each.blocks)
    shown = () if query.tenant else tuple(processes(state, now))
    return HoldersAnswer(query.query_id, state.at(query.tenant), shown, tuple(found[:MAX_PAGE]), len(found))


def holders(state: State, now: float, tenant: str = "") -> Iterator[HolderInfo]:
    """Everyone who holds a block; or those of a tenant alone."""
    for runner in state.runners:
        for sequence in runner_sequences(runner, tenant):
            holder = sequence_holder(runner, sequence, now)
            yield without_runner(holder) if tenant else holder
    for pin in state.pins.holders():
        if tenant in ("", pin.tenant):
            yield HolderInfo("pin", pin.name, "", len(pin.blocks))
    if tenant:
        return
    for runner in state.runners:
        if runner.credits:
            yield credits_holder(runner, now)
    for quarantine in state.quarantines.values():
        yield HolderInfo("quarantine", quarantine.lock, "", len(quarantine.blocks))
    if state.tiering is not None:
        if state.tiering.tier.demoting:
            yield HolderInfo("copy", "to the disk tier", "", len(state.tiering.tier.demoting))
        for comeback in set(state.tiering.comebacks.values()):
            yield HolderInfo("copy", "from the disk tier", "", len(comeback.blocks))


def runner_sequences(runner: Runner, tenant: str) -> list[Sequence]:
    prefix = tenant_bytes(tenant)
    return [
        sequence
        for active in runner.active.values()
        if active.request.salt.startswith(prefix)
        for sequence in active.sequences.values()
    ]


def sequence_holder(runner: Runner, sequence: Sequence, now: float) -> HolderInfo:
    silent = max(now - runner.last_heard, 0.0)
    blocks = len(sequence.table) + (sequence.source is not None)
    name = runner.hello.name
    stuck = silent >= STUCK_AFTER
    return HolderInfo("sequence", sequence.request_id, name, blocks, sequence.choice, silent, stuck)


def without_runner(holder: HolderInfo) -> HolderInfo:
    """For a tenant: where it runs, and how busy that is, depends on others."""
    return msgspec.structs.replace(holder, client="", seconds_silent=0.0, stuck=False)


def credits_holder(runner: Runner, now: float) -> HolderInfo:
    silent, name = max(now - runner.last_heard, 0.0), runner.hello.name
    return HolderInfo("credits", name, name, len(runner.credits), 0, silent, silent >= STUCK_AFTER)


def processes(state: State, now: float) -> Iterator[ProcessInfo]:
    """Frontends, runners, and those of whom only quarantined blocks are left."""
    for client in state.clients.values():
        if isinstance(client, Runner):
            yield runner_process(client, now)
        else:
            yield frontend_process(client)
    for quarantine in state.quarantines.values():
        size = len(quarantine.blocks)
        yield ProcessInfo("quarantine", quarantine.lock, 0, 0, 0, size, 0, False, False, False, 0.0)


def runner_process(runner: Runner, now: float) -> ProcessInfo:
    sequences = runner_sequences(runner, "")
    silent = max(now - runner.last_heard, 0.0)
    return ProcessInfo(
        "runner",
        runner.hello.name,
        runner.client_id,
        len(runner.active),
        len(sequences),
        sum(len(sequence.table) for sequence in sequences),
        len(runner.credits),
        runner.ready,
        runner.draining,
        silent >= STUCK_AFTER,
        silent,
    )


def frontend_process(frontend: Frontend) -> ProcessInfo:
    """Of its requests. Frontends are not listened for: `seconds_silent` is 0."""
    actives = [request.active for request in frontend.requests.values() if request.active is not None]
    sequences = [sequence for active in actives for sequence in active.sequences.values()]
    return ProcessInfo(
        "frontend",
        frontend.hello.name,
        frontend.client_id,
        len(frontend.requests),
        len(sequences),
        sum(len(sequence.table) for sequence in sequences),
        0,
        True,
        False,
        False,
        0.0,
    )


# --- one block ----------------------------------------------------------------------------------------------


def block_detail(state: State, query: BlockQuery, now: float) -> BlockDetail:
    """All about a block, if there is one and the tenant may see it."""
    pool, block = state.pool, query.block_id
    if pool is not None and query.block_hash:
        block = pool.index.primary.get(query.block_hash, -1)
    if pool is None or not 0 <= block < pool.num_blocks or not may_see(state, pool, block, query.tenant):
        return BlockDetail(query.query_id, state.at(query.tenant))
    tenant = query.tenant
    listed = tuple(info for holder in pool.ledger.holders(block) for info in describe(state, holder, now))
    if tenant:
        listed = tuple(without_runner(holder) for holder in listed if holder.kind in ("sequence", "pin"))
    (ref,), ref_count = told(pool, [block], tenant), len(listed) if tenant else pool.ledger.ref_count(block)
    tokens = memoryview(pool.tokens[block]).cast("I")
    if not tokens:
        return BlockDetail(
            query.query_id,
            state.at(query.tenant),
            ref,
            STATE_NAMES[pool.state[block]],
            ref_count,
            listed,
        )
    digest, parent = pool.block_hash[block], pool.parent_hash[block]
    above = pool.index.find(parent)
    return BlockDetail(
        query.query_id,
        state.at(query.tenant),
        ref,
        STATE_NAMES[pool.state[block]],
        ref_count,
        listed,
        digest.hex(),
        parent.hex(),
        -1 if above is None else above if not tenant else own_number(parent),
        first_token(state, pool, block),
        tuple(tokens),
        now - pool.sealed_at[block],
        pool.hits[block],
        () if tenant else tuple(other for other in pool.index.blocks(digest) if other != block),
        len(pool.children.of(digest + pool.salt[block])),
        tuple(
            pin.name
            for pin in pool.ledger.holders(block)
            if isinstance(pin, NamedPin) and pin is not state.pins.moving
        ),
        state.tiering is not None and digest in state.tiering.tier,
        -1 if tenant else eviction_rank(pool, block),
    )


def may_see(state: State, pool: BlockPool, block: int, tenant: str) -> bool:
    """Whether a block with content is of the tenant, or one without is written by a sequence of it."""
    if not tenant:
        return True
    if pool.tokens[block]:
        return pool.salt[block].startswith(tenant_bytes(tenant))
    own = {id(sequence) for sequence in state.sequences(tenant)}
    return any(id(holder) in own for holder in pool.ledger.holders(block))


def describe(state: State, holder: Holder, now: float) -> Iterator[HolderInfo]:
    """Of one block: the holder as `holders` lists it."""
    match holder:
        case Sequence():
            for runner in state.runners:
                if holder.start_id in runner.active:
                    yield sequence_holder(runner, holder, now)
        case Runner():
            yield credits_holder(holder, now)
        case NamedPin():
            yield HolderInfo("pin", holder.name, "", len(holder.blocks))
        case Quarantine():
            yield HolderInfo("quarantine", holder.lock, "", len(holder.blocks))
        case _:
            yield HolderInfo("copy", holder.describe(), "", 1)


def first_token(state: State, pool: BlockPool, block: int) -> int:
    """Index of the block's first token in its text; -1 if a block above it is gone from pool and tier, or it
    is too deep to tell.
    """
    kept = state.tiering.tier.contents_by_hash() if state.tiering is not None else {}
    depth = 0
    parent = pool.parent_hash[block]
    while parent != pool.root and depth < MAX_WALK:
        above = pool.index.find(parent)
        if above is not None:
            parent = pool.parent_hash[above]
        elif parent in kept:
            parent = kept[parent][1].parent_hash
        else:
            return -1
        depth += 1
    return depth * pool.block_size if parent == pool.root else -1


def eviction_rank(pool: BlockPool, block: int) -> int:
    """How many go before it; -1 if it is in use, or if those are more than are looked at."""
    for rank, other in enumerate(islice(pool.evictable(), MAX_WALK)):
        if other == block:
            return rank
    return -1
