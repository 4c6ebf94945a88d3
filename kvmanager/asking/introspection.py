"""What can be asked: frozen answers about the state."""

from kvmanager.asking.explain import explain
from kvmanager.asking.holders import block_detail, holders_answer
from kvmanager.asking.pages import blocks_page, events_page
from kvmanager.asking.plan import plan
from kvmanager.asking.request_pages import requests_page
from kvmanager.pool.block_pool import SEALED, BlockPool
from kvmanager.pool.hashing import HASH_BYTES, TOKEN_BYTES, tenant_fault
from kvmanager.pool.invariants import audit_page
from kvmanager.protocol import (
    MAX_PART,
    MAX_VOCABULARY,
    Answer,
    AuditQuery,
    BlockQuery,
    BlocksQuery,
    EventsQuery,
    Evict,
    ExplainQuery,
    HoldersQuery,
    Pin,
    PlanQuery,
    PoolStats,
    Query,
    Question,
    RequestsQuery,
    RunnerStats,
    Stats,
    StatsQuery,
    TextPart,
    TierStats,
)
from kvmanager.scheduling.clients import Frontend
from kvmanager.state import State


def fault(message: Query) -> str:
    """Why this cannot even be refused: it comes from no frontend of ours. Empty for a good one."""
    if isinstance(message, StatsQuery | AuditQuery):
        return ""
    if isinstance(message, ExplainQuery | PlanQuery | TextPart | Pin | Evict):
        tokens = message.token_ids
        if len(tokens) > MAX_PART or (tokens and not 0 <= min(tokens) <= max(tokens) < MAX_VOCABULARY):
            return f"{len(tokens)} tokens, of which one is outside 0 to {MAX_VOCABULARY - 1}, or too many"
    if isinstance(message, Evict) and len(message.prefix) not in (0, HASH_BYTES):
        return f"a block's hash has {HASH_BYTES} bytes, and not {len(message.prefix)}"
    return tenant_fault(message.tenant)


def answer(state: State, frontend: Frontend, message: Question, now: float) -> Answer:
    """Changes nothing."""
    match message:
        case ExplainQuery():
            return explain(state, frontend, message, now)
        case PlanQuery():
            return plan(state, frontend, message, now)
        case AuditQuery():
            return audit_page(state, message)
        case BlocksQuery():
            return blocks_page(state, message, now)
        case BlockQuery():
            return block_detail(state, message, now)
        case HoldersQuery():
            return holders_answer(state, message, now)
        case RequestsQuery():
            return requests_page(state, message, now)
        case EventsQuery():
            return events_page(state, message)


def statistics(state: State, query_id: int, now: float) -> Stats:
    """Gauges and counters of the whole manager."""
    counters = state.counters
    return Stats(
        query_id=query_id,
        pool=state.pool.statistics() if state.pool else PoolStats(0, 0, 0, 0, 0, 0, 0),
        runners=tuple(
            RunnerStats(
                name=runner.hello.name,
                client_id=runner.client_id,
                ready=runner.ready,
                draining=runner.draining,
                running=sum(len(active.sequences) for active in runner.active.values()),
                credits=len(runner.credits),
                last_report_age=now - runner.last_heard,
            )
            for runner in state.runners
        ),
        waiting=len(state.waiting),
        running=sum(len(runner.active) for runner in state.runners),
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        preemptions=counters.preemptions,
        evictions=state.pool.evictions if state.pool else 0,
        rejected=counters.rejected,
        dropped_messages=counters.dropped_messages,
        prefix_waits=counters.prefix_waits,
        recomputed_tokens=counters.recomputed_tokens,
        used_tokens=used_tokens(state, state.pool) if state.pool else 0,
        tier=tier_statistics(state),
        at=state.at(),
    )


def used_tokens(state: State, pool: BlockPool) -> int:
    """Slots that hold a token, of those in reserved and sealed blocks: as the runners last reported."""
    sequences = (each for active in state.actives() for each in active.sequences.values())
    sources = {each.source for each in sequences if each.source is not None}
    sources |= {pin.blocks[-1] for pin in state.pins.holders() if pin.blocks}
    missing = sum(pool.block_size - len(pool.tokens[source]) // TOKEN_BYTES for source in sources)
    return (
        pool.counts[SEALED] * pool.block_size
        - missing
        + sum(runner.num_tail_tokens for runner in state.runners)
    )


def tier_statistics(state: State) -> TierStats:
    if state.pool is None or state.tiering is None:
        return TierStats()
    tier = state.tiering.tier
    size = len(tier) * state.pool.layout.block_bytes
    return TierStats(tier.num_slots, len(tier), size, tier.demotions, tier.promotions, tier.failures)
