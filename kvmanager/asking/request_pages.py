"""Requests as they can be asked for: live ones, and those that ended lately, in the order of coming."""

import math

import msgspec

from kvmanager.asking.explain import told
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.protocol import MAX_PAGE, RequestInfo, RequestKind, RequestsPage, RequestsQuery, SequenceInfo
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Ended, Request, StartState
from kvmanager.state import State

MAX_REQUESTS = 256  # of one page
MAX_ENTRIES = 1 << 14  # entries of block tables that are looked at for one page, but for the last request's

KINDS: dict[StartState, RequestKind] = {
    StartState.RUNNING: "running",
    StartState.CANCELLING: "cancelling",
    StartState.PREEMPTING: "preempting",
}

Item = Request | Ended
Key = tuple[float, str, int]
"""Arrival, request_id and attempt: their order is that of the pages, and tells nothing of other requests."""


def requests_page(state: State, query: RequestsQuery, now: float) -> RequestsPage:
    """From behind `cursor` on. A cursor that is none begins anew."""
    after = read_cursor(query.cursor)
    known = everything(state, query.tenant)
    wanted = sorted([key for key in known if key > after and query.request_id in ("", key[1])])
    page: list[RequestInfo] = []
    entries = 0
    for key in wanted[: min(max(query.limit, 1), MAX_REQUESTS)]:
        if entries >= MAX_ENTRIES:
            break
        info = describe(state, known[key], now, bool(query.request_id), query.tenant)
        page.append(info)
        entries += sum(sequence.num_blocks for sequence in info.sequences)
        after = key
    cursor = write_cursor(after) if len(page) < len(wanted) else ""
    return RequestsPage(query.query_id, state.at(query.tenant), tuple(page), cursor)


def write_cursor(key: Key) -> str:
    arrival, request_id, attempt = key
    return f"{arrival.hex()} {attempt} {request_id}"


def read_cursor(text: str) -> Key:
    """Before everything if it is none."""
    arrival, _, rest = text.partition(" ")
    attempt, _, request_id = rest.partition(" ")
    try:
        return float.fromhex(arrival), request_id, int(attempt)
    except (ValueError, OverflowError):
        return -math.inf, "", 0


def everything(state: State, tenant: str) -> dict[Key, Item]:
    """A tenant's, or all. One that is cancelled, but has not ended on its runner, counts as live."""
    known: dict[Key, Item] = {
        (ended.arrival, ended.info.request_id, ended.info.attempt): ended
        for ended in state.ended.get(tenant, ())
    }
    live = [active.request for active in state.actives()]
    for client in state.clients.values():
        live += client.requests.values() if isinstance(client, Frontend) else ()
    for request in live:
        submit = request.submit
        if tenant in ("", submit.tenant):
            known[submit.arrival, submit.request_id, submit.attempt] = request
    return known


def describe(state: State, item: Item, now: float, tables: bool, tenant: str) -> RequestInfo:
    """A tenant is not told where it runs: which runner has room depends on others."""
    if isinstance(item, Ended):
        return msgspec.structs.replace(item.info, age=now - item.arrival)
    active = item.active or next((each for each in state.actives() if each.request is item), None)
    if active is None:
        return item.describe(waiting_kind(item), now)
    pool = state.pool
    assert pool is not None
    sequences = tuple(sequence_info(pool, each, tables, tenant) for each in active.sequences.values())
    runner = "" if tenant else active.runner.hello.name
    return item.describe(KINDS[active.state], now, runner, sequences)


def waiting_kind(request: Request) -> RequestKind:
    if request.awaited is not None:
        return "waiting_for_prefix"
    return "waiting_for_tier" if request.copies_until is not None else "waiting"


def sequence_info(pool: BlockPool, sequence: Sequence, tables: bool, tenant: str) -> SequenceInfo:
    table = sequence.table
    return SequenceInfo(
        sequence.choice,
        len(sequence.tokens),
        sequence.num_computed,
        len(table),
        sum(count > 1 for count in pool.ledger.counts_of(table)),
        told(pool, table[:MAX_PAGE], tenant) if tables else (),
    )
