"""The audit: everything that must be true between any two events. Slow, and free of side effects."""

from collections import Counter
from collections.abc import Iterator

from kvmanager.pool.block_audit import audit_blocks, name_of
from kvmanager.pool.block_pool import RESERVED, SEALED, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.protocol import MAX_PAGE, AuditPage, AuditQuery
from kvmanager.scheduling.admission import largest_request
from kvmanager.scheduling.clients import MAX_REMEMBERED, Frontend
from kvmanager.scheduling.requests import RequestState, StartState
from kvmanager.state import State

MAX_BLOCKS = 128  # of one page


def audit(state: State) -> list[str]:
    """What is violated, one line each; empty when all is well."""
    num_blocks = state.pool.num_blocks if state.pool is not None else 0
    return [*audit_blocks(state, 0, num_blocks), *_whole(state)]


def audit_page(state: State, query: AuditQuery) -> AuditPage:
    """Some of the blocks; with the first of them what takes no loop over blocks."""
    num_blocks = state.pool.num_blocks if state.pool is not None else 0
    first = min(max(query.first, 0), num_blocks)
    end = min(first + min(max(query.limit, 1), MAX_BLOCKS), num_blocks)
    faults = [*audit_blocks(state, first, end), *(_whole(state) if not first else ())]
    return AuditPage(query.query_id, state.at(), num_blocks, end - first, tuple(faults[:MAX_PAGE]))


def _whole(state: State) -> Iterator[str]:
    if state.pool is not None:
        yield from _pins(state, state.pool)
        if state.pool.may_evict != (not state.survivors):
            yield f"may_evict is {state.pool.may_evict} with survivors {sorted(state.survivors)}"
    yield from _tier(state)
    yield from _sessions(state)
    yield from _requests(state)
    yield from _in_flight(state)


def _tier(state: State) -> Iterator[str]:
    """Slots are used once; copies under way are of content that is there, into blocks nobody else touches."""
    pool, tiering = state.pool, state.tiering
    if pool is None or tiering is None:
        return
    tier = tiering.tier
    slots = [copy.slot for copy in tier.demoting.values()]
    if len(slots) != len(set(slots)) or any(tier.slots(slot, slot + 1)[0] is not None for slot in slots):
        yield f"the tier's slots are used more than once: {sorted(slots)}"
    doomed = sum(copy not in tier.demoting.values() for copy in tier.doomed)
    if len(tier) + len(slots) + doomed + tier.num_free != tier.num_slots:
        yield "the tier's slots do not add up"
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
    if pins.uses != Counter(block for pin in pins.holders() for block in pin.blocks):
        yield "the blocks counted as pinned are not those of the pins"
    for tenant in {pin.tenant for pin in pins.by_key.values()} | pins.counts.keys():
        own = len({block for pin in pins.by_key.values() if pin.tenant == tenant for block in pin.blocks})
        if own != pins.counts[tenant] or own > pins.budget(pool, tenant):
            yield f"{own} blocks are pinned for {tenant!r}, and {pins.counts[tenant]} are counted"
    if pins.total != pins.counts.total() or pins.total > pins.budget(pool):
        yield f"{pins.total} blocks are pinned and {pins.budget(pool)} may be"
    if pins.total and largest_request(state) > pins.usable(pool):
        yield f"a request of {largest_request(state)} blocks does not fit beside the pins"
    for key, pin in pins.by_key.items():
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
    if sequence.num_sealed != sequence.num_computed // pool.block_size:
        yield f"{sequence.describe()}: {sequence.num_sealed} blocks sealed of {sequence.num_computed} tokens"
    last = sequence.table[sequence.num_sealed - 1] if 0 < sequence.num_sealed <= len(sequence.table) else None
    if sequence.last_hash != (pool.root if last is None else pool.block_hash[last]):
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
        wanted = active.request
        entry = wanted.frontend.requests.get(wanted.submit.request_id)
        if wanted.state is not RequestState.GONE and entry is not wanted:
            yield f"start {active.start_id} is of a request that its frontend does not have"
        live = active.request.state is RequestState.RUNNING and active.request.active is active
        if not active.sequences or (active.state is not StartState.CANCELLING and not live):
            yield f"start {active.start_id} is {active.state.name} and has nothing to run"
    for client in state.clients.values():
        if isinstance(client, Frontend) and len(client.gone) > MAX_REMEMBERED:
            yield f"{len(client.gone)} requests are remembered"


def _in_flight(state: State) -> Iterator[str]:
    """Blocks in flight are announced and not sealed; who waits for one is set aside."""
    announced: dict[bytes, list[Sequence]] = {}
    for active in state.actives():
        for sequence in active.sequences.values():
            if active.state is StartState.PREEMPTING and sequence.num_settled < len(sequence.announced):
                yield f"{sequence.describe()} is {active.state.name} and still announces blocks"
            for digest, _, _, _ in sequence.announced[sequence.num_settled :]:
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
