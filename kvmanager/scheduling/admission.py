"""Admission: which waiting request starts next, where, and on which blocks.

Strictly in the queue's order: if the first one does not fit, nobody behind it starts, so that none starves;
and running ones of a lower priority give way to it.
A request starts with all its sequences or not at all; until everything is known to be there, nothing is
changed.
"""

from collections.abc import Collection
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvmanager.asking.event_log import NOBODY, Asker
from kvmanager.pool.block_pool import CACHED, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.protocol import Lookup, Rejected, SequenceStart, Start
from kvmanager.scheduling import pressure
from kvmanager.scheduling.clients import Frontend, Runner
from kvmanager.scheduling.requests import ActiveStart, Found, Group, Request, RequestState
from kvmanager.state import State
from kvmanager.tier.tiering import Copies


class Plan(Struct, frozen=True):
    """What a start would take: for each group what the cache has of it, and how many fresh blocks."""

    found: tuple[Found, ...]
    new_blocks: int
    cached_hits: int  # distinct hits that nobody holds: reusing them takes them from what is available
    cached_sources: int  # the same of blocks to copy from


def plan_start(pool: BlockPool, request: Request) -> Plan:
    """Look everything up; changes nothing."""
    found, new_blocks, reads_cache = [], 0, request.reads_cache
    for group in request.groups:
        found.append(group.lookup(pool, request.salt) if reads_cache else Found([]))
        new_blocks += -(-len(group.tokens) // pool.block_size) - len(found[-1].blocks)
    first = found[0]
    if len(found) == 1:  # then none is named twice, and they may be many
        hits: Collection[int] = first.blocks
        sources = {first.source} if first.num_shared else set()
    else:
        hits = set().union(*[each.blocks for each in found])
        sources = {each.source for each in found if each.num_shared} - hits
    return Plan(
        tuple(found),
        new_blocks,
        num_cached(pool, hits) if hits else 0,
        num_cached(pool, sources) if sources else 0,
    )


def num_cached(pool: BlockPool, blocks: Collection[int]) -> int:
    """How many of them nobody holds."""
    return [*map(pool.state.__getitem__, blocks)].count(CACHED)


def fits(state: State, pool: BlockPool, request: Request, plan: Plan) -> bool:
    """Whether there are blocks for this start, and enough are left then for what runs to grow, if anything
    does. To say how many takes long, and there are most often more than are ever left for it.
    """
    room = pool.available - plan.new_blocks
    if pool.may_evict:
        room -= plan.cached_hits + plan.cached_sources
    least = int(state.policy.watermark * pool.num_blocks)
    most = int(state.policy.growth_room * pool.num_blocks)
    if room >= max(least, most) or not any(runner.seats for runner in state.runners):
        return room >= 0
    return room >= least and room >= min(most, pressure.expected_growth(state, pool, request))


def without_copies(plan: Plan) -> Plan:
    """The plan that computes what it would copy, and so keeps no block to copy from."""
    return replace(plan, found=tuple([Found(each.blocks) for each in plan.found]), cached_sources=0)


def most_blocks(request: Request, block_size: int) -> int:
    """Blocks of a request at its longest. Choices share full prompt blocks; the last token needs none."""
    shared = len(request.prompt) // block_size
    each = -(-(request.max_length - 1) // block_size)
    return shared + len(request.submit.choices) * (each - shared)


def largest_request(state: State) -> int:
    """Blocks that one of the requests that are live now may come to need, at most."""
    if state.pool is None:
        return 0
    size = state.pool.block_size
    frontends = [client for client in state.clients.values() if isinstance(client, Frontend)]
    requests = (request for frontend in frontends for request in frontend.requests.values())
    return max((most_blocks(request, size) for request in requests), default=0)


def why_it_never_fits(state: State, request: Request) -> str:
    """The reason with its numbers, or an empty string. Runners' limits are known while there are any."""
    submit = request.submit
    num_prompt, max_tokens, num_choices = len(request.prompt), submit.sampling.max_tokens, len(submit.choices)
    if state.pool is not None:
        size = state.pool.block_size
        needed = most_blocks(request, size)
        if needed > state.pins.usable(state.pool):
            pins = state.pins.total
            pinned = "" if not pins else "some are pinned" if submit.tenant else f"{pins} are pinned"
            return (
                f"the request needs {needed} blocks of {size} tokens ({num_prompt} prompt tokens, "
                f"max_tokens {max_tokens}, {num_choices} choices) and the pool has {state.pool.num_blocks}"
                f"{f', of which {pinned}' if pinned else ''}; "
                f"ask for fewer tokens, {'remove a pin, ' if pinned else ''}or start with larger pool_bytes"
            )
    length = num_prompt + max_tokens
    for runner in state.runners:
        if runner.hello.max_model_len >= length and runner.hello.max_num_seqs >= num_choices:
            return ""
    if state.runners:
        longest = max([runner.hello.max_model_len for runner in state.runners])
        if length > longest:
            return (
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} make {length}, "
                f"and the model takes {longest}; ask for fewer tokens"
            )
        widest = max([runner.hello.max_num_seqs for runner in state.runners])
        if num_choices > widest:
            return f"{num_choices} choices are more than the {widest} sequences of a runner; ask for fewer"
    return ""


def postpone(pool: BlockPool, request: Request, usable: int) -> None:
    """Leave for later what might not fit beside the first groups.

    Choices that have gone apart no longer share the prompt for sure (its blocks may have been evicted), so
    together they may need more than the `usable` blocks, although the request was small enough when new.
    Beams cannot go on one after the other: the search begins anew then.
    """
    each = -(-(request.max_length - 1) // pool.block_size)
    needed = 0
    for place, group in enumerate(request.groups):
        shared = len(group.tokens) // pool.block_size
        needed += shared + len(group.choices) * (each - shared)
        if place and needed > usable and request.search is not None:
            request.search = None
            request.groups = request.group(tuple(request.beams()))
            return
        if place and needed > usable:
            request.later.extend(request.groups[place:])
            del request.groups[place:]
            return


def pick_runner(state: State, request: Request, now: float) -> Runner | None:
    """The least loaded runner that has room for all choices and takes that many tokens; a silent one only if
    there is no other.
    """
    num_choices, longest = request.num_choices, request.max_length
    able = [
        runner
        for runner in state.runners
        if runner.free_seats() >= num_choices and runner.hello.max_model_len >= longest
    ]
    if len(able) < 2:
        return able[0] if able else None
    return min(able, key=lambda runner: (now - runner.last_heard >= pressure.SILENCE, runner.seats))


def in_flight(state: State, pool: BlockPool, request: Request, plan: Plan) -> bytes | None:
    """The deepest block of the request that is being computed now, where its first missing one is."""
    producers = state.in_flight.producers
    if not producers or not request.reads_cache or not state.policy.prefix_wait:
        return None
    for place, group in enumerate(request.groups):
        deepest = None
        for digest, _, _, _ in group.blocks(pool, request.salt)[len(plan.found[place].blocks) :]:
            if digest not in producers:
                break
            deepest = digest
        if deepest is not None:
            return deepest
    return None


class Decision(Struct, frozen=True):
    """What becomes of a request whose turn it is, and what has to be known for that."""

    outcome: Literal["start", "wait_for_prefix", "wait_for_tier", "wait_for_room", "refuse"]
    reason: str = ""  # of "refuse"
    runner: Runner | None = None
    plan: Plan | None = None  # None: nothing was looked up, as there is no seat for it anywhere
    awaited: bytes = b""  # hash of the block that is being computed, of "wait_for_prefix"
    copies: Copies | None = None  # of "wait_for_tier"
    victims: tuple[ActiveStart, ...] = ()  # that would have to give way, of "wait_for_room"; one at a time


def decide(state: State, pool: BlockPool, request: Request, now: float) -> Decision:
    """Changes nothing, but leaves for later what of the request might not fit at once."""
    usable = state.pins.usable(pool)
    if len(request.groups) > 1:
        postpone(pool, request, usable)
    runner = pick_runner(state, request, now)
    too_large = most_blocks(request, pool.block_size) > usable
    if (runner is None or too_large) and (reason := why_it_never_fits(state, request)):
        return Decision("refuse", reason)
    if runner is None and not pressure.lower(state, request, now):
        return Decision("wait_for_room")
    plan = plan_start(pool, request)
    if (digest := in_flight(state, pool, request, plan)) is not None:
        return Decision("wait_for_prefix", "", runner, plan, digest)
    if runner is None:
        victims = pressure.seat_victims(state, request, now)
        return Decision("wait_for_room", plan=plan, victims=victims)
    if not fits(state, pool, request, plan):
        smaller = without_copies(plan)
        if any(runner.seats for runner in state.runners) or not fits(state, pool, request, smaller):
            needed = plan.new_blocks + plan.cached_hits
            victims = pressure.block_victims(state, pool, request, needed, now)
            return Decision("wait_for_room", "", runner, plan, victims=victims)
        plan = smaller
    if state.tiering is not None:
        hits = [found.blocks for found in plan.found]
        copies = state.tiering.copies_for(pool, request, hits, now)
        if copies is not None:
            return Decision("wait_for_tier", "", runner, plan, copies=copies)
    return Decision("start", "", runner, plan)


def admit(state: State, now: float) -> None:
    """Start requests from the head of the queue for as long as the first one fits.

    One whose next block is being computed now steps aside until it is there: those behind it need not wait.
    """
    state.admission_due = False
    pool = state.pool
    while pool is not None and (request := state.waiting.first) is not None:
        decision = decide(state, pool, request, now)
        if decision.outcome == "refuse":
            reject_waiting(state, request, "can_never_fit", decision.reason)
        elif decision.outcome == "wait_for_prefix":
            producer = state.in_flight.producers[decision.awaited]
            request.waited_for, request.waited_since = producer.request_id, now
            state.in_flight.await_block(request, decision.awaited)
            state.counters.prefix_waits += 1
        elif decision.outcome == "start":
            assert decision.runner is not None
            assert decision.plan is not None
            start(state, pool, request, decision.runner, decision.plan, now)
        else:
            if decision.victims:
                pressure.preempt(state, decision.victims[0])
            if decision.copies is not None and state.tiering is not None:
                state.tiering.begin(pool, request, decision.copies, now)
            return


def reject_waiting(state: State, request: Request, code: str, message: str, retry_after: float = 0.0) -> None:
    """Drop a request that waits, and say why."""
    state.forget(request)
    state.counters.rejected += 1
    submit = request.submit
    state.send(request.frontend, Rejected(submit.request_id, submit.attempt, code, message, retry_after))


def start(state: State, pool: BlockPool, request: Request, runner: Runner, plan: Plan, now: float) -> None:
    """Take the blocks and tell the runner. Hits are held before any is granted: none is evicted for it."""
    state.waiting.remove(request)
    request.state = RequestState.RUNNING
    state.last_start_id += 1
    active = ActiveStart(state.last_start_id, request, runner, now)
    request.active = active
    request.copies_until = None
    request.lookup = Lookup(
        len(request.groups[0].tokens),
        len(plan.found[0].blocks),
        plan.found[0].num_shared,
        request.promoted,
        request.waited_for,
        now - request.waited_since if request.waited_for else 0.0,
    )
    runner.active[active.start_id] = active
    runner.seats += request.num_choices
    for place, group in enumerate(request.groups):
        found = plan.found[place]
        sequence = begin(active, group, pool)
        sequence.reuse(pool, found.blocks)
        if found.num_shared:
            sequence.copy_from(pool, found.source, found.num_shared)
        sequence.num_cached = sequence.num_computed
        sequence.advanced_at = now
        state.in_flight.announce(sequence, group.blocks(pool, request.salt))
        if request.computed:
            lost = request.computed.get(sequence.choice, 0) - sequence.num_computed
            state.counters.recomputed_tokens += max(lost, 0)
        active.sequences[sequence.choice] = sequence
    count_lookup(state, request, active)
    starts = []
    pool.log.asker = Asker(request.submit.request_id, request.salt)
    for group in request.groups:
        sequence = active.sequences[group.choices[0]]
        sequence.grow(pool, -(-len(group.tokens) // pool.block_size))
        starts.append(
            SequenceStart(
                sequence.choice,
                group.output,
                pool.refs(sequence.table),
                sequence.num_computed,
                sequence.pending_forks,
                None if sequence.source is None else pool.ref(sequence.source),
            )
        )
    pool.log.asker = NOBODY
    submit = request.submit
    told = Start(
        active.start_id,
        submit.request_id,
        submit.attempt,
        request.frontend.hello.token_endpoint,
        submit.prompt_token_ids,
        submit.sampling,
        tuple(starts),
        request.search,
    )
    runner.outbox.starts += (told,)


def begin(active: ActiveStart, group: Group, pool: BlockPool) -> Sequence:
    """The sequence of a group, without blocks yet."""
    sequence = Sequence(
        active.runner.owner_tag,
        active.start_id,
        group.choices[0],
        group.tokens[:],
        active.request.salt,
        pool.root,
        group.choices[1:],
    )
    sequence.request_id = active.request.submit.request_id
    sequence.max_length = active.request.max_length
    return sequence


def count_lookup(state: State, request: Request, active: ActiveStart) -> None:
    """Once per request, however often it waited, was preempted or resubmitted."""
    if request.submit.read_cache and not request.counted:
        state.counters.prefix_cache_queries += len(request.prompt)
        first = next(iter(active.sequences.values()))
        state.counters.prefix_cache_hits += min(first.num_computed, len(request.prompt))
    request.counted = True
