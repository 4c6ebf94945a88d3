"""Pin, Unpin and PinsQuery. Commands on pins are done one after the other, each in as many parts as it takes,
by the messages of such commands and by ticks; the answer comes when all is done. What is listed is there
whole, and what is not is gone whole.
"""

from collections.abc import Iterator
from math import inf

from kvmanager.asking import long_text
from kvmanager.asking.long_text import LongText
from kvmanager.messages.pins import Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import token_array
from kvmanager.scheduling import admission
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.pins import Fault, Job, NamedPin, PinKey, Steps
from kvmanager.scheduling.requests import Found
from kvmanager.state import State

MAX_PINS = 1024
MAX_TENANT_PINS = 64
MAX_NAME_CHARS = 128
MAX_TTL = 366 * 86400.0  # seconds
PARTS = 2  # of a pin, that are done by one message or tick
MAX_JOBS = 8  # of one tenant that wait for their turn


def command(state: State, frontend: Frontend, message: Pin | Unpin | PinsQuery, now: float) -> None:
    """Begin it, and do a part of what is under way."""
    expire(state, now)
    if isinstance(message, PinsQuery):
        state.send(frontend, answer(state, message, now, None))
        return
    steps = begin(state, frontend, message, now)
    if isinstance(steps, Fault):
        state.send(frontend, answer(state, message, now, steps))
    else:
        state.pins.jobs.append(Job(frontend.client_id, message, steps))
    go_on(state, now)


def begin(state: State, frontend: Frontend, message: Pin | Unpin, now: float) -> Steps | Fault:
    """What there is to do, or why nothing is."""
    pool, jobs = state.pool, [job.message for job in state.pins.jobs if job.message is not None]
    if sum(job.tenant == message.tenant for job in jobs) >= MAX_JOBS:
        return Fault("pin_busy", f"{MAX_JOBS} other pins are being made or ended; try again")
    if isinstance(message, Unpin):
        return unpin(state, message)
    if pool is None:
        return Fault("not_ready", "there is no block pool yet: no runner has come")
    if (wrong := why_malformed(message)) is not None:
        return Fault("invalid_request", wrong)
    return pin(state, pool, message, long_text.of_command(state, frontend, message, pool))


def go_on(state: State, now: float) -> None:
    """A part of what is under way."""
    jobs, cost, state.pins.now = state.pins.jobs, 0, now
    while jobs and cost < PARTS * state.pins.part:
        job = jobs[0]
        try:
            cost += next(job.steps)
        except StopIteration as end:
            jobs.popleft()
            client = state.clients.get(job.client_id)
            if job.message is not None and isinstance(client, Frontend):
                state.send(client, answer(state, job.message, now, end.value))
        state.admission_due = True


def expire(state: State, now: float) -> None:
    """Those whose time is over are to go."""
    over = [key for key, pin in state.pins.by_key.items() if pin.expires_at <= now]
    if over and all(job.message is not None for job in state.pins.jobs):
        state.pins.jobs.append(Job(0, None, end_pins(state, now=now)))


def pin(state: State, pool: BlockPool, message: Pin, text: LongText) -> Steps:
    """The longest prefix that is cached. What is found of it is held part by part; then, with all of it, it
    must still be allowed. Its time begins when it is there.
    """
    pins, made = state.pins, NamedPin(message.name, inf, message.tenant)
    # A lookup leaves the last token to be computed: one more is given, so that it looks for all of these.
    text.add(token_array((0,)), pool)
    found = text.lookup(pool, text.salt)
    blocks = [*found.blocks, *source(found)]
    fault = why_not(state, pool, made, blocks, pins.growth(made.key, blocks, held=False))
    if fault is not None:
        return fault
    yield len(found.blocks)
    while blocks := text.find_next(pool, len(made.blocks), pins.part):
        pins.hold(pool, made, blocks)
        yield len(blocks)
    found, full = text.below(pool, made.blocks), len(made.blocks)
    made.num_tokens = full * pool.block_size + found.num_shared
    pins.hold(pool, made, source(found))
    yield full
    growth = pins.growth(made.key, made.blocks, held=True)
    fault = why_not(state, pool, made, made.blocks, growth)
    if fault is None:
        made.expires_at = pins.now + message.ttl
        pins.commit(pool, made, growth)
    yield full
    yield from pins.let_go(pool)
    return fault


def source(found: Found) -> list[int]:
    """The block of which only a part is of the text, if there is one."""
    return [found.source] if found.num_shared else []


def unpin(state: State, message: Unpin) -> Steps:
    key = (message.tenant, message.name)
    if state.pool is None or key not in state.pins.by_key:
        return Fault("not_found", f"there is no pin {message.name[:MAX_NAME_CHARS]!r}")
    yield from end_pin(state, state.pool, key)
    return None


def end_pins(state: State, tenant: str = "", now: float = inf) -> Steps:
    """Those of a tenant, or all, whose time is over then."""
    assert state.pool is not None
    for pin in state.pins.of(tenant):
        if pin.expires_at <= now and state.pins.by_key.get(pin.key) is pin:
            yield from end_pin(state, state.pool, pin.key)
    return None


def end_pin(state: State, pool: BlockPool, key: PinKey) -> Iterator[int]:
    state.pins.remove(key)
    yield from state.pins.let_go(pool)


def why_not(state: State, pool: BlockPool, pin: NamedPin, blocks: list[int], growth: int) -> Fault | None:
    """Why it cannot be there with these blocks, by which `growth` more would be pinned."""
    pins, tenant = state.pins, pin.tenant
    most = MAX_TENANT_PINS if tenant else MAX_PINS
    if pin.key not in pins.by_key and len(pins.of(tenant)) >= most:
        return Fault("pin_budget", f"there are {most} pins already; remove one first")
    if not blocks or (pool.unfound and not pool.unfound.isdisjoint(blocks)):
        return Fault(
            "not_cached",
            "nothing of these tokens is cached under this salt; send them as a request once, then pin them",
        )
    if beyond := pins.beyond_budget(pool, tenant, growth):
        return Fault("pin_budget", f"{len(blocks)} blocks for pin {pin.name!r} {beyond}")
    total, largest = pins.total + growth, admission.largest_request(state)
    if largest <= pool.num_blocks - total:
        return None
    needs = f"a request that is live now may need {largest} blocks, and beside {total} pinned "
    left = f"ones {pool.num_blocks - total} of {pool.num_blocks} would be left; "
    reason = "not enough would be left for what runs now; " if tenant else needs + left
    return Fault("pin_busy", f"{reason}try again when it has ended")


def why_malformed(message: Pin) -> str | None:
    if not 1 <= len(message.name) <= MAX_NAME_CHARS:
        return f"a pin's name has {len(message.name)} characters; want 1 to {MAX_NAME_CHARS}"
    if not 0 < message.ttl <= MAX_TTL:
        return f"a pin's ttl is {message.ttl} seconds; want more than 0, at most {MAX_TTL:g}"
    return None


def answer(state: State, message: Pin | Unpin | PinsQuery, now: float, fault: Fault | None) -> PinsAnswer:
    """The tenant's pins by name, and why the message was refused. A query for no tenant is for all. A pin
    that this has made is among them even if its time is over by now.
    """
    pins, tenant = state.pins, message.tenant
    every = isinstance(message, PinsQuery) and not tenant
    made = (tenant, message.name) if isinstance(message, Pin) and fault is None else None
    listed = [
        pin
        for pin in pins.by_key.values()
        if (every or pin.tenant == tenant) and (pin.expires_at > now or pin.key == made)
    ]
    return PinsAnswer(
        message.query_id,
        tuple(
            Pinned(
                pin.name,
                len(pin.blocks),
                pin.num_tokens,
                max(pin.expires_at - now, 0.0),
                pin.tenant if every else "",
            )
            for pin in sorted(listed, key=lambda pin: pin.name)
        ),
        pins.counts[tenant] if tenant else pins.total,
        pins.budget(state.pool, tenant) if state.pool else 0,
        fault.code if fault else "",
        fault.message if fault else "",
    )
