"""A dry run: what admission would do with a request now. It asks the very function that admission does."""

from itertools import islice

import msgspec

from kvmanager.asking import long_text
from kvmanager.asking.explain import as_submit, told
from kvmanager.pool.block_pool import FREE, BlockPool
from kvmanager.pool.hashing import tenant_bytes
from kvmanager.protocol import MAX_PAGE, Outcome, PlanAnswer, PlanQuery
from kvmanager.scheduling import admission, submissions
from kvmanager.scheduling.admission import Decision, Plan
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Request
from kvmanager.state import State


def plan(state: State, frontend: Frontend, query: PlanQuery, now: float) -> PlanAnswer:
    """Changes nothing."""
    text = long_text.whole(frontend, query, state.pool)
    try:
        request = submissions.accept(state, frontend, as_submit(query, text, now), now)
    except submissions.Refusal as refusal:
        return PlanAnswer(query.query_id, state.at(query.tenant), "refuse", refusal.message)
    pool = state.pool
    assert pool is not None, "a request is not accepted before there is a pool"
    if text is not None:
        text.choices = request.groups[0].choices
        request.groups = [text]
    decision = admission.decide(state, pool, request, now)
    if decision.outcome == "refuse":
        return PlanAnswer(query.query_id, state.at(query.tenant), "refuse", decision.reason)
    looked_up = decision.plan or admission.plan_start(pool, request)
    return answer(state, pool, query, request, decision, looked_up)


def answer(
    state: State, pool: BlockPool, query: PlanQuery, request: Request, decision: Decision, found: Plan
) -> PlanAnswer:
    """In words and numbers, without those of other tenants."""
    ahead = [each for each in state.waiting if each.awaited is None and each.order < request.order]
    first = found.found[0]
    hits = first.blocks  # which may be many
    if len(found.found) > 1:
        hits = list(dict.fromkeys(block for each in found.found for block in each.blocks))
    promote = len(decision.copies.missing) if decision.copies is not None else 0
    outcome: Outcome = "wait_for_turn" if ahead else decision.outcome
    evicted = [] if ahead else evictions(state, pool, decision, found, hits)
    victims = [] if ahead else [active.request for active in decision.victims]
    size = pool.block_size
    most = admission.most_blocks(request, size)
    waits = outcome == "wait_for_prefix"
    awaited = state.in_flight.producers[decision.awaited].request_id if waits else ""
    seen = tenant_bytes(query.tenant)
    plan_answer = PlanAnswer(
        query.query_id,
        state.at(query.tenant),
        outcome,
        "",
        decision.runner.hello.name if decision.runner is not None and not query.tenant else "",
        told(pool, hits[:MAX_PAGE], query.tenant),
        told(pool, [first.source], query.tenant)[0] if first.num_shared else None,
        first.num_shared,
        len(first.blocks) * size + first.num_shared,
        promote,
        found.new_blocks,
        most - len(first.blocks),
        told(pool, [block for block in evicted if pool.salt[block].startswith(seen)], query.tenant),
        tuple(each.submit.request_id for each in victims if query.tenant in ("", each.submit.tenant)),
        awaited,
        sum(query.tenant in ("", each.submit.tenant) for each in ahead),
        len(hits[MAX_PAGE:]),
    )
    return msgspec.structs.replace(plan_answer, message=in_words(plan_answer, size))


def evictions(state: State, pool: BlockPool, decision: Decision, found: Plan, hits: list[int]) -> list[int]:
    """Cached blocks that would make room at once, in order: what is held first is not among them."""
    if decision.outcome == "start":
        wanted, held = found.new_blocks, [each.source for each in found.found if each.num_shared] + hits
    elif decision.copies is not None and state.tiering is not None:
        promoting = state.tiering.tier.promoting
        wanted = sum(digest not in promoting for digest in decision.copies.missing)
        held = decision.copies.found
    else:
        return []
    missing = min(max(wanted - pool.counts[FREE], 0), MAX_PAGE)
    kept = set(held) if missing else set()
    return list(islice((block for block in pool.evictable() if block not in kept), missing))


def in_words(plan: PlanAnswer, block_size: int) -> str:
    """What happens first, with the numbers."""
    reuses = f"{len(plan.reuse) + plan.more_reused} cached blocks of {block_size} tokens"
    if plan.num_copied_tokens:
        reuses += f" and {plan.num_copied_tokens} tokens copied from another"
    takes = f"it reuses {reuses}, and takes {plan.allocate} fresh blocks"
    if plan.evict:
        takes += f", for which {len(plan.evict)} cached ones are evicted"
    match plan.outcome:
        case "start":
            return f"it starts now{f' on {plan.runner!r}' if plan.runner else ''}: {takes}"
        case "wait_for_turn":
            return f"it waits for its turn behind {plan.ahead or 'other'} requests; then {takes}"
        case "wait_for_prefix":
            return f"it waits for request {plan.waits_for!r}, which computes its next blocks; then {takes}"
        case "wait_for_tier":
            return f"it waits until {plan.promote} blocks have come from the disk tier; now {takes}"
        case _:
            preempts = f", for which {len(plan.preempt)} requests give way" if plan.preempt else ""
            return f"it waits for room{preempts}; then {takes}"
