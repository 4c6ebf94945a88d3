"""Requests as they can be asked for: live ones, and those that ended lately, in the order of coming."""

import msgspec

from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.protocol import MAX_PAGE, RequestInfo, RequestKind, RequestsPage, RequestsQuery, SequenceInfo
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Ended, Request, StartState
from kvmanager.state import State

MAX_REQUESTS = 256  # of one page
MAX_DIGITS = 18  # of a cursor
MAX_ENTRIES = 1 << 14  # entries of block tables that are looked at for one page, but for the last request's

KINDS: dict[StartState, RequestKind] = {
    StartState.RUNNING: "running",
    StartState.CANCELLING: "cancelling",
    StartState.PREEMPTING: "preempting",
}

Item = Request | Ended


def requests_page(state: State, query: RequestsQuery, now: float) -> RequestsPage:
    """From behind `cursor` on. A cursor that is none begins anew."""
    cursor = query.cursor
    after = int(cursor) if cursor.isascii() and cursor.isdecimal() and len(cursor) <= MAX_DIGITS else 0
    known = everything(state)
    wanted = [serial for serial in sorted(known) if serial > after and matches(known[serial], query)]
    page: list[RequestInfo] = []
    entries = 0
    for serial in wanted[: min(max(query.limit, 1), MAX_REQUESTS)]:
        if entries >= MAX_ENTRIES:
            break
        info = describe(state, known[serial], now, bool(query.request_id))
        page.append(info)
        entries += sum(sequence.num_blocks for sequence in info.sequences)
        after = serial
    cursor = str(after) if len(page) < len(wanted) else ""
    return RequestsPage(query.query_id, state.at(), tuple(page), cursor)


def everything(state: State) -> dict[int, Item]:
    """By serial number. One that is cancelled, but has not ended on its runner, counts as live."""
    known: dict[int, Item] = {ended.serial: ended for ended in state.ended}
    for client in state.clients.values():
        for request in client.requests.values() if isinstance(client, Frontend) else ():
            known[request.serial] = request
    for active in state.actives():
        known[active.request.serial] = active.request
    return known


def matches(item: Item, query: RequestsQuery) -> bool:
    """Whether the query asks for this one, and may see it."""
    if isinstance(item, Ended):
        tenant, request_id = item.tenant, item.info.request_id
    else:
        tenant, request_id = item.submit.tenant, item.submit.request_id
    return query.tenant in ("", tenant) and query.request_id in ("", request_id)


def describe(state: State, item: Item, now: float, tables: bool) -> RequestInfo:
    if isinstance(item, Ended):
        return msgspec.structs.replace(item.info, age=now - item.arrival)
    active = item.active or next((each for each in state.actives() if each.request is item), None)
    if active is None:
        return item.describe(waiting_kind(item), now)
    pool = state.pool
    assert pool is not None
    sequences = tuple(sequence_info(pool, each, tables) for each in active.sequences.values())
    return item.describe(KINDS[active.state], now, active.runner.hello.name, sequences)


def waiting_kind(request: Request) -> RequestKind:
    if request.awaited is not None:
        return "waiting_for_prefix"
    return "waiting_for_tier" if request.copies_until is not None else "waiting"


def sequence_info(pool: BlockPool, sequence: Sequence, tables: bool) -> SequenceInfo:
    table = sequence.table
    return SequenceInfo(
        sequence.choice,
        len(sequence.tokens),
        sequence.num_computed,
        len(table),
        sum(count > 1 for count in pool.ledger.counts_of(table)),
        pool.refs(table[:MAX_PAGE]) if tables else (),
    )
