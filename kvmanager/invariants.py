"""The audit: everything that must be true between any two events. Slow, and free of side effects."""

from collections import Counter
from collections.abc import Iterator

from kvmanager.admission import largest_request
from kvmanager.block_pool import CACHED, FREE, RESERVED, SEALED, STATE_NAMES, BlockPool
from kvmanager.block_table import Sequence
from kvmanager.clients import Frontend
from kvmanager.hashing import TOKEN_BYTES, block_hash
from kvmanager.ledger import Holder
from kvmanager.requests import RequestState, StartState
from kvmanager.state import MAX_REMEMBERED, State


def audit(state: State) -> list[str]:
    """What is violated, one line each; empty when all is well."""
    return [*_pool(state), *_tier(state), *_sessions(state), *_requests(state), *_in_flight(state)]


def _pool(state: State) -> Iterator[str]:
    pool = state.pool
    if pool is None:
        return
    counted = Counter(pool.state)
    for kind, name in enumerate(STATE_NAMES):
        if counted[kind] != pool.counts[kind]:
            yield f"{counted[kind]} blocks are {name} and {pool.counts[kind]} are counted"
    free, cached = set(pool.free), {*pool.cached, *pool.backed}
    if len(pool.cached) + len(pool.backed) != len(cached):
        yield "a cached block is in both of the queues for eviction"
    for block in range(pool.num_blocks):
        kind = pool.state[block]
        if (block in free) != (kind == FREE) or (block in cached) != (kind == CACHED):
            yield f"block {block} is {STATE_NAMES[kind]} and in the wrong queue"
        if (pool.ledger.ref_count(block) == 0) != (kind in (FREE, CACHED)):
            yield f"block {block} is {STATE_NAMES[kind]} with {pool.ledger.ref_count(block)} references"
    yield from _index(pool)
    yield from _ledger(state, pool)
    yield from _pins(state, pool)
    if pool.may_evict != (not state.survivors):
        yield f"may_evict is {pool.may_evict} with survivors {sorted(state.survivors)}"


def name_of(pool: BlockPool, block: int) -> str:
    return STATE_NAMES[pool.state[block]]


def _index(pool: BlockPool) -> Iterator[str]:
    indexed = {block: digest for digest, blocks in pool.index.entries().items() for block in blocks}
    children = pool.children.entries()
    for block in range(pool.num_blocks):
        sealed = pool.state[block] in (SEALED, CACHED)
        if sealed != (block in indexed) or (sealed and indexed[block] != pool.block_hash[block]):
            yield f"block {block} is {name_of(pool, block)} and the index says otherwise"
        if not sealed and (pool.block_hash[block] or pool.tokens[block]):
            yield f"block {block} is {name_of(pool, block)} and has a hash or tokens"
        if sealed:
            digest = block_hash(pool.parent_hash[block], pool.tokens[block], pool.salt[block])
            length = len(pool.tokens[block])
            if digest != pool.block_hash[block] or not 0 < length <= pool.block_size * TOKEN_BYTES:
                yield f"block {block} has a hash that is not that of its content"
            content = (pool.parent_hash[block] + pool.salt[block], pool.tokens[block])
            if children.pop(block, None) != content:
                yield f"block {block} is not the child that it should be"
    for block in children:
        yield f"block {block} is {name_of(pool, block)} and a child"


def _ledger(state: State, pool: BlockPool) -> Iterator[str]:
    """The ledger says what tables, credits and quarantines say, and nobody else holds anything."""
    expected: dict[int, list[Holder]] = {}
    for runner in state.runners:
        for block in runner.credits:
            expected.setdefault(block, []).append(runner)
    for active in state.actives():
        for sequence in active.sequences.values():
            for block in (*sequence.table, *(() if sequence.source is None else (sequence.source,))):
                expected.setdefault(block, []).append(sequence)
    for pin in state.pins.by_name.values():
        for block in pin.blocks:
            expected.setdefault(block, []).append(pin)
    for quarantine in state.quarantines.values():
        for block in quarantine.blocks:
            expected.setdefault(block, []).append(quarantine)
    if state.tiering is not None:
        for copy in state.tiering.tier.demoting.values():
            expected.setdefault(copy.block, []).append(state.tiering.demoter)
        for comeback in set(state.tiering.comebacks.values()):
            for block in comeback.blocks:
                expected.setdefault(block, []).append(comeback)
    for block in range(pool.num_blocks):
        listed, wanted = pool.ledger.holders(block), expected.get(block, [])
        if len(listed) != len(wanted) or set(listed) != set(wanted):
            names = [holder.describe() for holder in listed]
            yield f"block {block} is held by {names} and wanted by {[holder.describe() for holder in wanted]}"


def _tier(state: State) -> Iterator[str]:
    """Slots are used once; copies under way are of content that is there, into blocks nobody else touches."""
    pool, tiering = state.pool, state.tiering
    if pool is None or tiering is None:
        return
    tier = tiering.tier
    slots = [slot for slot, _ in tier.contents()] + [copy.slot for copy in tier.demoting.values()]
    if len(slots) != len(set(slots)) or len(slots) > tier.num_slots:
        yield f"the tier's slots are used more than once: {sorted(slots)}"
    for slot, content in tier.contents():
        if block_hash(content.parent_hash, content.tokens, content.salt) != content.block_hash:
            yield f"slot {slot} has a hash that is not that of its content"
    for digest, copy in tier.demoting.items():
        if pool.state[copy.block] != SEALED or pool.block_hash[copy.block] != digest:
            yield f"block {copy.block} is copied to the tier as something else"
    if set(tier.promoting) != set(tiering.comebacks):
        yield "promotions under way are not those that requests asked for"
    for copy in tier.promoting.values():
        if pool.state[copy.block] != RESERVED or pool.ledger.ref_count(copy.block) != 1:
            yield f"block {copy.block} is filled from the tier and is {name_of(pool, copy.block)}"
    for comeback in set(tiering.comebacks.values()):
        if comeback.pending != sum(other is comeback for other in tiering.comebacks.values()):
            yield f"{comeback.describe()}: another number is under way"


def _pins(state: State, pool: BlockPool) -> Iterator[str]:
    """Pins are within their budget, and every live request fits beside them."""
    pins = state.pins
    if pins.uses != Counter(block for pin in pins.by_name.values() for block in pin.blocks):
        yield "the blocks counted as pinned are not those of the pins"
    if len(pins.uses) > pins.budget(pool):
        yield f"{len(pins.uses)} blocks are pinned and {pins.budget(pool)} may be"
    if pins.uses and largest_request(state) > pins.usable(pool):
        yield f"a request of {largest_request(state)} blocks does not fit beside the pins"
    for key, pin in pins.by_name.items():
        if pin.key != key or not pin.blocks or any(pool.state[block] != SEALED for block in pin.blocks):
            yield f"{pin.describe()} is kept as {key!r} or holds a block that is not sealed"


def _sessions(state: State) -> Iterator[str]:
    if set(state.by_lock.values()) != set(state.clients.values()):
        yield "clients by lock are not the clients"
    runners = {client for client in state.clients.values() if not isinstance(client, Frontend)}
    if set(state.runners) != runners or len(state.runners) != len(runners):
        yield "the runners are not the clients that are runners"
    for runner in state.runners:
        seats = sum(1 + len(s.pending_forks) for a in runner.active.values() for s in a.sequences.values())
        if runner.seats != seats:
            yield f"runner {runner.client_id} counts {runner.seats} seats and has {seats}"
        for active in runner.active.values():
            for sequence in active.sequences.values():
                yield from _sequence(state, sequence)


def _sequence(state: State, sequence: Sequence) -> Iterator[str]:
    pool = state.pool
    assert pool is not None
    size = pool.block_size
    if sequence.num_sealed != sequence.num_computed // size:
        yield f"{sequence.describe()}: {sequence.num_sealed} blocks sealed of {sequence.num_computed} tokens"
    digest = pool.root
    for index, block in enumerate(sequence.table):
        if index >= sequence.num_sealed:
            if pool.state[block] != RESERVED:
                yield f"{sequence.describe()} writes block {block}, which is {name_of(pool, block)}"
            continue
        packed = sequence.tokens[index * size : (index + 1) * size].tobytes()
        if pool.state[block] != SEALED or pool.tokens[block] != packed or pool.parent_hash[block] != digest:
            yield f"{sequence.describe()} reads block {block}, which does not hold its tokens"
        digest = pool.block_hash[block]
    if sequence.last_hash != digest:
        yield f"{sequence.describe()} continues another chain than its table's"


def _requests(state: State) -> Iterator[str]:
    waiting = list(state.waiting)
    turns = [request.order for request in waiting if request.awaited is None]
    if turns != sorted(turns):
        yield "the queue is not in order"
    for request in waiting:
        if request.state is not RequestState.WAITING or request.active is not None:
            yield f"request {request.submit.request_id} waits and is {request.state.name}"
    for client in state.clients.values():
        for key, request in client.requests.items() if isinstance(client, Frontend) else ():
            placed = request in waiting if request.active is None else request.active in state.actives()
            known = key == request.submit.request_id and request.frontend is client
            if request.state is RequestState.GONE or not placed or not known:
                yield f"request {key} is {request.state.name} and in the wrong place"
    for active in state.actives():
        live = active.request.state is RequestState.RUNNING and active.request.active is active
        if not active.sequences or (active.state is not StartState.CANCELLING and not live):
            yield f"start {active.start_id} is {active.state.name} and has nothing to run"
    if len(state.gone) > MAX_REMEMBERED:
        yield f"{len(state.gone)} requests are remembered"


def _in_flight(state: State) -> Iterator[str]:
    """Blocks in flight are announced and not sealed; who waits for one is set aside."""
    announced: dict[bytes, list[Sequence]] = {}
    for active in state.actives():
        for sequence in active.sequences.values():
            if active.state is not StartState.RUNNING and sequence.num_settled < len(sequence.announced):
                yield f"{sequence.describe()} is {active.state.name} and still announces blocks"
            for digest in sequence.announced[sequence.num_settled :]:
                announced.setdefault(digest, []).append(sequence)
    for digest, producer in state.in_flight.producers.items():
        if producer not in announced.get(digest, ()):
            yield f"{producer.describe()} is to compute a block that it has not announced"
    waiters = state.in_flight.waiters()
    asleep = [request for requests in waiters.values() for request in requests]
    if set(asleep) != {request for request in state.waiting if request.awaited is not None}:
        yield "those that wait for a block are not those set aside"
    for digest, requests in waiters.items():
        if digest not in state.in_flight.producers or any(each.awaited != digest for each in requests):
            yield f"{len(requests)} requests wait for a block that nobody computes"
