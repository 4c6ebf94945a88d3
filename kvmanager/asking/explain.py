"""Why a text hits as far as it does: the lookup of admission itself, and what is known of the block at which
it ends.
"""

from collections.abc import Iterable

import msgspec

from kvmanager.asking import long_text
from kvmanager.asking.long_text import LongText
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import TOKEN_BYTES, block_hash, tenant_bytes
from kvmanager.protocol import (
    MAX_CHOICES,
    MAX_PAGE,
    BlockRef,
    Choice,
    Eviction,
    ExplainQuery,
    Explanation,
    PlanQuery,
    SamplingParams,
    Sibling,
    Submit,
    own_numbers,
)
from kvmanager.scheduling import admission
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Group, Request
from kvmanager.state import State


def as_submit(query: ExplainQuery | PlanQuery, text: LongText | None, now: float) -> Submit:
    """What a frontend would send for it. `text`: all of it, where a part had come before."""
    choices, max_tokens, priority = 1, 1, 0
    if isinstance(query, PlanQuery):
        choices, max_tokens, priority = query.num_choices, query.max_tokens, query.priority
    return Submit(
        "asked",
        0,
        now,
        query.token_ids if text is None else text.tokens,  # type: ignore[arg-type]  # as good
        tuple(Choice(index) for index in range(min(choices, MAX_CHOICES + 1))),
        SamplingParams(max_tokens, 0),
        priority,
        query.cache_salt,
        tenant=query.tenant,
    )


def explain(state: State, frontend: Frontend, query: ExplainQuery, now: float) -> Explanation:
    """Changes nothing. The tokens must be such as can be submitted."""
    text = long_text.whole(frontend, query, state.pool)
    pool, number = state.pool, len(query.token_ids if text is None else text.tokens)
    if pool is None or not number:
        return Explanation(query.query_id, state.at(query.tenant), number, 0, 0, (), 0, "never_seen")
    request = Request(frontend, as_submit(query, text, now), state.last_serial + 1)
    if text is not None:
        request.groups = [text]
    decision = admission.decide(state, pool, request, now)
    plan = decision.plan or admission.plan_start(pool, request)
    awaited = admission.in_flight(state, pool, request, plan)
    (group,), (found,) = request.groups, plan.found
    blocks, tier_blocks, shared = list(found.blocks), 0, found.num_shared
    if awaited is None and state.tiering is not None:
        copies = decision.copies
        if decision.outcome != "start" and copies is None:
            copies = state.tiering.copies_for(pool, request, [found.blocks], now)
        if copies is not None:
            blocks, tier_blocks = copies.found, len(copies.missing)
            shared = alike(pool, group, request.salt, len(blocks) + tier_blocks)[1]
    reach = len(blocks) + tier_blocks
    sibling = nearest(pool, group, request.salt, reach, shared, query.tenant)
    explanation = Explanation(
        query.query_id,
        state.at(query.tenant),
        number,
        reach * pool.block_size + shared,
        pool.block_size,
        told(pool, blocks[:MAX_PAGE], query.tenant),
        tier_blocks,
        "partial" if shared else "never_seen",
        sibling,
        more_blocks=len(blocks[MAX_PAGE:]),
    )
    if explanation.num_cached_tokens >= number - 1:
        return msgspec.structs.replace(explanation, reason="hit")
    if awaited is not None:
        producer = state.in_flight.producers[awaited]
        return msgspec.structs.replace(explanation, reason="being_computed", computed_by=producer.request_id)
    eviction = end_of_more(pool, group, request.salt, reach, shared, query.tenant)
    if eviction is None:
        return explanation
    reason = "other_layout" if eviction.cause == "other_layout" else "evicted"
    return msgspec.structs.replace(explanation, reason=reason, eviction=eviction)


def told(pool: BlockPool, blocks: Iterable[int], tenant: str) -> tuple[BlockRef, ...]:
    """As whoever asks knows these blocks."""
    if not tenant:
        return pool.refs(blocks)
    contents = pool.contents
    return tuple([(number, 0) for number in own_numbers([contents[block][0] for block in blocks])])


def rest_of(pool: BlockPool, group: Group, reach: int) -> bytes:
    """What a lookup looks for below so many full blocks: packed tokens, but never the last one."""
    end = min((reach + 1) * pool.block_size, len(group.tokens) - 1)
    return group.tokens[reach * pool.block_size : end].tobytes()


def parent_of(pool: BlockPool, group: Group, salt: bytes, reach: int) -> bytes:
    return group.blocks(pool, salt)[reach - 1][0] if reach else pool.root


def alike(pool: BlockPool, group: Group, salt: bytes, reach: int) -> tuple[int, int]:
    """The block that shares the most tokens below so many full ones, and how many."""
    parent = parent_of(pool, group, salt, reach)
    return pool.children.most_alike(parent + salt, rest_of(pool, group, reach))


def nearest(
    pool: BlockPool, group: Group, salt: bytes, reach: int, shared: int, tenant: str
) -> Sibling | None:
    """The block that begins most like the text there, though it may share nothing."""
    key = parent_of(pool, group, salt, reach) + salt
    block = pool.children.nearest(key, rest_of(pool, group, reach))
    if block is None:
        return None
    return Sibling(told(pool, [block], tenant)[0], tuple(memoryview(pool.tokens[block]).cast("I")), shared)


def end_of_more(
    pool: BlockPool, group: Group, salt: bytes, reach: int, shared: int, tenant: str
) -> Eviction | None:
    """The end of what followed there: the next full block, or the longest tail of an earlier sequence that
    the text goes on from. Of what was only alike in part nothing is known any more.
    """
    full = group.blocks(pool, salt)
    if reach < len(full) and (found := end_of(pool, full[reach][0], tenant)) is not None:
        return found
    parent, rest = parent_of(pool, group, salt, reach), rest_of(pool, group, reach)
    for end in range(min(len(rest), pool.block_bytes - TOKEN_BYTES), shared * TOKEN_BYTES, -TOKEN_BYTES):
        found = end_of(pool, block_hash(parent, rest[:end], salt), tenant)
        if found is not None:
            return found
    return None


def end_of(pool: BlockPool, digest: bytes, tenant: str) -> Eviction | None:
    """When, why and for whom this content went, as far as that is remembered."""
    log = pool.log
    event = log.removal(digest)
    if event is None:
        when = log.other_layout.get(digest)
        return None if when is None else Eviction(log.now - when, "other_layout")
    asker = log.asker_of(event)
    name = asker.request_id if asker.salt.startswith(tenant_bytes(tenant)) else ""
    return Eviction(log.now - event.time, event.cause or "capacity", name)
