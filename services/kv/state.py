"""GET /kv/stats, /kv/requests, /kv/requests/{id}, /kv/holders and /kv/audit: figures, and who holds what."""

import asyncio
import base64
import re
import time
from functools import partial
from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager.protocol import (
    MAX_ID_CHARS,
    MAX_PAGE,
    AuditPage,
    AuditQuery,
    BlocksPage,
    BlocksQuery,
    HoldersAnswer,
    HoldersQuery,
    Lookup,
    PinsAnswer,
    PinsQuery,
    ProcessInfo,
    RequestInfo,
    RequestsPage,
    RequestsQuery,
    RunnerStats,
    SequenceInfo,
    Stats,
    StatsQuery,
)
from services.auth import admin, observer
from services.context import Context
from services.errors import ApiError, invalid
from services.kv import state_answers as answers
from services.kv.ask import Parameters, ask, holder_card, ref, reply
from services.kv.collect import Collector
from services.kv.contents import Contents

LIVE: Final = "live"  # all but those that have ended
REQUEST_STATES: Final = (
    "",
    LIVE,
    "waiting",
    "waiting_for_prefix",
    "waiting_for_tier",
    "running",
    "preempting",
    "cancelling",
    "ended",
)
RUNNING: Final = frozenset({"running", "preempting", "cancelling"})
MAX_REQUEST_CURSOR: Final = 400
_CURSOR: Final = re.compile(r"[0-9a-fx.+-]{1,40}p[+-]\d{1,4} \d{1,10} .{1,128}", re.DOTALL)
MAX_PAGES: Final = 8  # of the manager's, for one of ours
MAX_FAULTS: Final = 1000
AUDIT_SECONDS: Final = 30.0
AUDITED_BLOCKS: Final = 512  # at once


class StateRoutes:
    """The five."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._collector = collector
        self._backend = context.backend
        self._config = context.config

    def routes(self) -> list[Route]:
        return [
            Route("/kv/stats", self.stats),
            Route("/kv/requests", self.requests),
            Route("/kv/requests/{id}", self.request),
            Route("/kv/holders", self.holders),
            Route("/kv/audit", self.audit),
        ]

    async def stats(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        Parameters(request, ())
        stats, pins, page = await asyncio.gather(
            ask(self._backend, StatsQuery, Stats),
            ask(self._backend, lambda number: PinsQuery(number, tenant), PinsAnswer),
            ask(self._backend, lambda number: BlocksQuery(number, 0, 1, tenant=tenant), BlocksPage),
        )
        if tenant:
            contents = (await self._collector.collect(tenant)).contents
            return reply(tenants_stats(pins, page, contents, await self._all_requests(tenant)))
        return reply(all_stats(stats, pins, page, self._config.stuck_seconds))

    async def requests(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        given = Parameters(request, ("state", "cursor", "limit"))
        state = given.choice("state", REQUEST_STATES)
        cursor = read_cursor(given.text("cursor", MAX_REQUEST_CURSOR))
        limit = given.number("limit", 256, 1, MAX_PAGE)
        for _ in range(MAX_PAGES):
            page = await self._requests_page(tenant, cursor, limit)
            cursor = page.next_cursor
            found = [request_card(info) for info in page.requests if is_in(info, state)]
            if found or not cursor:
                break
        return reply(
            answers.RequestsAnswer(
                boot_id=page.at.boot_id,
                sequence=page.at.sequence,
                requests=found,
                next_cursor=write_cursor(cursor) if cursor else None,
            )
        )

    async def request(self, request: Request) -> Response:
        """By its own id, or by that of the response: then its first prompt. The last attempt of it."""
        tenant = observer(request, self._config).tenant
        Parameters(request, ())
        name: str = request.path_params["id"]
        for request_id in (name, f"{name}-0"):
            if len(request_id) > MAX_ID_CHARS:
                continue
            query = partial(RequestsQuery, request_id=request_id, tenant=tenant)
            page = await ask(self._backend, query, RequestsPage)
            if page.requests:
                at, card = page.at, request_card(page.requests[-1])
                return reply(answers.RequestAnswer(boot_id=at.boot_id, sequence=at.sequence, request=card))
        message = f"no request {name[:MAX_ID_CHARS]!r} is live, or has ended lately"
        raise ApiError(404, message, param="id", code="not_found")

    async def holders(self, request: Request) -> Response:
        tenant = observer(request, self._config).tenant
        Parameters(request, ())
        found = await ask(self._backend, lambda number: HoldersQuery(number, tenant), HoldersAnswer)
        processes = [] if tenant else [process_card(process) for process in found.processes]
        return reply(
            answers.HoldersAnswer(
                boot_id=found.at.boot_id,
                sequence=found.at.sequence,
                processes=processes,
                holders=[holder_card(holder) for holder in found.holders],
                num_holders=found.num_holders,
            )
        )

    async def audit(self, request: Request) -> Response:
        """In pages, so that nobody waits for it; each page is right for its own moment."""
        admin(request, self._config)
        Parameters(request, ())
        started, checked = time.monotonic(), 0
        faults: list[str] = []
        while True:
            query = partial(AuditQuery, first=checked, limit=AUDITED_BLOCKS)
            page = await ask(self._backend, query, AuditPage)
            checked += page.checked
            faults += page.faults
            seconds = time.monotonic() - started
            if not page.checked or checked >= page.num_blocks or seconds > AUDIT_SECONDS:
                break
        return reply(
            answers.AuditAnswer(
                boot_id=page.at.boot_id,
                sequence=page.at.sequence,
                ok=not faults and checked >= page.num_blocks,
                checked=checked,
                num_blocks=page.num_blocks,
                faults=list(dict.fromkeys(faults))[:MAX_FAULTS],
                seconds=round(seconds, 3),
            )
        )

    async def _requests_page(self, tenant: str, cursor: str, limit: int) -> RequestsPage:
        return await ask(
            self._backend,
            lambda number: RequestsQuery(number, tenant=tenant, cursor=cursor, limit=limit),
            RequestsPage,
        )

    async def _all_requests(self, tenant: str) -> list[RequestInfo]:
        """A tenant's, as far as MAX_PAGES go."""
        found: list[RequestInfo] = []
        cursor = ""
        for _ in range(MAX_PAGES):
            page = await self._requests_page(tenant, cursor, MAX_PAGE)
            found += page.requests
            cursor = page.next_cursor
            if not cursor:
                break
        return found


def write_cursor(cursor: str) -> str:
    """The manager's, as a word without a meaning."""
    return base64.urlsafe_b64encode(cursor.encode()).decode().rstrip("=")


def read_cursor(text: str) -> str:
    """As the manager gave it, or empty. Raises ApiError 400."""
    try:
        found = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True).decode()
    except ValueError:
        found = ""
    if text and not _CURSOR.fullmatch(found):
        raise invalid("cursor", "`cursor` is not one that an answer gave as `next_cursor`")
    return found


def is_in(info: RequestInfo, state: str) -> bool:
    """Whether a request is in one of REQUEST_STATES; "" is any."""
    return state in ("", info.state) or (state == LIVE and info.state != "ended")


def all_stats(stats: Stats, pins: PinsAnswer, page: BlocksPage, stuck_seconds: float) -> answers.StatsAnswer:
    """For an admin. A runner that is silent for longer than `stuck_seconds` counts as stuck."""
    queries, hits, pool = stats.prefix_cache_queries, stats.prefix_cache_hits, stats.pool
    used = (pool.reserved + pool.sealed) * pool.block_size
    card = pool_card(stats, page)
    card.used_tokens, card.waste = stats.used_tokens, round(1 - stats.used_tokens / used, 4) if used else 0.0
    return answers.StatsAnswer(
        boot_id=stats.at.boot_id,
        sequence=stats.at.sequence,
        pool=card,
        requests=answers.RequestsCard(
            stats.running, stats.waiting, stats.preemptions, stats.recomputed_tokens, stats.rejected
        ),
        pins=answers.PinsCard(pins.pinned_blocks, pins.budget_blocks),
        cache=answers.CacheCard(
            queries, hits, round(hits / queries, 4) if queries else None, stats.evictions, stats.prefix_waits
        ),
        tier=answers.TierCard(
            stats.tier.num_slots,
            stats.tier.blocks,
            stats.tier.bytes,
            stats.tier.demotions,
            stats.tier.promotions,
            stats.tier.failures,
        ),
        runners=[runner_card(runner, stuck_seconds) for runner in stats.runners],
        dropped_messages=stats.dropped_messages,
    )


def tenants_stats(
    pins: PinsAnswer, page: BlocksPage, contents: Contents, own: list[RequestInfo]
) -> answers.StatsAnswer:
    """For a tenant: the pool's size, and its own counts."""
    found = [row for row in range(len(contents)) if contents.blocks[row]]
    sealed = sum(contents.references[row] > 0 for row in found)
    running = sum(info.state in RUNNING for info in own)
    ended = sum(info.state == "ended" for info in own)
    return answers.StatsAnswer(
        boot_id=page.at.boot_id,
        sequence=page.at.sequence,
        pool=answers.PoolCard(
            page.num_blocks,
            page.block_size,
            page.block_bytes or None,
            None,
            None,
            sealed,
            len(found) - sealed,
            None,
            None,
            None,
        ),
        requests=answers.RequestsCard(running, len(own) - running - ended),
        pins=answers.PinsCard(pins.pinned_blocks, pins.budget_blocks),
        cache=UNSET,
    )


def pool_card(stats: Stats, page: BlocksPage) -> answers.PoolCard:
    pool = stats.pool
    return answers.PoolCard(
        pool.num_blocks,
        pool.block_size,
        page.block_bytes or None,
        pool.free,
        pool.reserved,
        pool.sealed,
        pool.cached,
        pool.quarantined,
        None,
        None,
    )


def runner_card(runner: RunnerStats, stuck_seconds: float) -> answers.RunnerCard:
    return answers.RunnerCard(
        runner.name,
        runner.client_id,
        runner.ready,
        runner.draining,
        runner.last_report_age > stuck_seconds,
        runner.running,
        runner.credits,
        round(runner.last_report_age, 3),
    )


def process_card(process: ProcessInfo) -> answers.ProcessCard:
    return answers.ProcessCard(
        process.kind,
        process.name,
        process.client_id,
        process.requests,
        process.sequences,
        process.blocks,
        process.credits,
        process.ready,
        process.draining,
        process.stuck,
        round(process.seconds_silent, 3),
    )


def request_card(info: RequestInfo) -> answers.RequestCard:
    return answers.RequestCard(
        info.request_id,
        info.frontend,
        info.state,
        info.priority,
        round(info.age, 3),
        info.attempt,
        info.num_prompt_tokens,
        info.max_tokens,
        info.num_choices,
        info.preemptions,
        info.runner,
        None if info.lookup is None else lookup_card(info.lookup),
        [sequence_card(sequence) for sequence in info.sequences],
    )


def lookup_card(lookup: Lookup) -> answers.LookupCard:
    return answers.LookupCard(
        lookup.num_tokens,
        lookup.hit_blocks,
        lookup.copied_tokens,
        lookup.promoted_blocks,
        lookup.waited_for,
        round(lookup.waited_seconds, 3),
    )


def sequence_card(sequence: SequenceInfo) -> answers.SequenceCard:
    return answers.SequenceCard(
        sequence.choice,
        sequence.num_tokens,
        sequence.num_computed,
        sequence.num_blocks,
        sequence.shared_blocks,
        [ref(block) for block in sequence.block_table],
    )
