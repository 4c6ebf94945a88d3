"""Taking over what runs since an earlier start of the manager: each start is checked as a whole, then taken.

Its blocks must be what the records say: first those with the very content that its tokens have, then those
that were its runner's to write. A start of which that is not so is not taken over, which costs no more than
computing some of it again.
"""

from array import array
from typing import NamedTuple

from kvmanager.pool.block_pool import QUARANTINED, RESERVED, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import Held, hash_chain, token_array
from kvmanager.protocol import MAX_CHOICES, Accepted, HeldSequence, HeldStart, NotHeld, Submit
from kvmanager.scheduling import sessions
from kvmanager.scheduling.admission import why_it_never_fits
from kvmanager.scheduling.clients import Frontend, Quarantine, Runner
from kvmanager.scheduling.requests import ActiveStart, Request, RequestState
from kvmanager.state import State


class Taken(NamedTuple):
    """A sequence that can be taken over. `contents`: what the full blocks of its tokens hold."""

    held: HeldSequence
    tokens: "array[int]"
    contents: list[Held]


def end_roll_call(state: State, now: float) -> None:
    """If it is over: take over what is both held and claimed, and tell everybody."""
    roll_call, pool = state.roll_call, state.pool
    if roll_call is None or pool is None or not roll_call.is_over(now):
        return
    state.roll_call = None
    for runner, holdings in roll_call.holdings.items():
        quarantine = state.quarantines.get(runner.hello.lock, Quarantine(runner.hello.lock))
        credits = {block for block, _ in holdings.credits}
        if credits <= {*quarantine.blocks} and {*pool.refs(credits)} == {*holdings.credits}:
            for held in holdings.starts:
                claim = roll_call.claims.get((held.token_endpoint, held.request_id))
                if claim is not None and take_over(
                    state, pool, runner, held, *claim, quarantine, credits, now
                ):
                    del roll_call.claims[held.token_endpoint, held.request_id]
        if runner.kept:
            for block in credits:
                pool.take_out_of_quarantine(block, quarantine, runner)
            runner.credits = credits
        quarantine.blocks = [block for block in quarantine.blocks if pool.state[block] == QUARANTINED]
        state.send(runner, sessions.welcome_to(state, runner))
    for frontend, submit in roll_call.claims.values():
        state.send(frontend, NotHeld(((submit.request_id, submit.attempt),)))
    state.admission_due = True


def take_over(
    state: State,
    pool: BlockPool,
    runner: Runner,
    held: HeldStart,
    frontend: Frontend,
    submit: Submit,
    quarantine: Quarantine,
    credits: set[int],
    now: float,
) -> bool:
    """The start goes on under this manager; False, and nothing is changed, if it cannot."""
    try:
        request = Request(frontend, submit, state.last_serial + 1)
        taken = [look_at(pool, request, each) for each in held.sequences]
    except OverflowError:  # a token id
        return False
    own = {block for block in quarantine.blocks if pool.state[block] == QUARANTINED} - credits
    choices = [choice for each in held.sequences for choice in (each.choice, *each.forks)]
    sound = (
        submit.attempt == held.attempt
        and held.start_id not in runner.active
        and choices
        and len({*choices}) == len(choices)
        and {*choices} <= {*range(MAX_CHOICES)}
        and not why_it_never_fits(state, request)
        and all(is_sound(pool, request, each, own) for each in taken)
    )
    if not sound:
        return False
    active = begin(state, runner, request, held, choices, now)
    for each in taken:
        sequence = active.sequences[each.held.choice] = hold(pool, active, each, quarantine)
        sequence.forked = len(taken) > 1
        state.in_flight.announce(sequence, each.contents)
        sequence.seal(pool, now)
        state.in_flight.settle(sequence)
    state.send(frontend, Accepted(submit.request_id, submit.attempt))
    return True


def look_at(pool: BlockPool, request: Request, held: HeldSequence) -> Taken:
    """Raises OverflowError for a token id that is none."""
    tokens = request.prompt + token_array(held.output_token_ids)
    return Taken(held, tokens, hash_chain(pool.root, tokens.tobytes(), pool.block_bytes, request.salt))


def is_sound(pool: BlockPool, request: Request, taken: Taken, own: set[int]) -> bool:
    """Whether its table is what the records say; `own`: blocks that its runner may write."""
    table, size, computed = taken.held.block_table, pool.block_size, taken.held.num_computed_tokens
    num_sealed = next((index for index, block in enumerate(table) if block in own), len(table))
    return (
        0 <= computed <= len(taken.tokens) <= request.max_length
        and computed <= len(table) * size < request.max_length + size
        and len({*table}) == len(table)
        and num_sealed <= computed // size
        and own.issuperset(table[num_sealed:])
        and all(map(pool.holds, table[:num_sealed], taken.contents))
    )


def begin(
    state: State, runner: Runner, request: Request, held: HeldStart, choices: list[int], now: float
) -> ActiveStart:
    """The start, as it would be had this manager begun it. Choices that it does not run come after it."""
    state.last_serial = request.serial
    state.last_start_id = max(state.last_start_id, held.start_id)
    request.state, request.counted = RequestState.RUNNING, True
    request.frontend.requests[held.request_id] = request
    if request.submit.sampling.beam is None:
        rest = tuple(choice for choice in request.submit.choices if choice.index not in choices)
        request.later = request.group(rest)
        request.groups = [group for group in request.groups if not {*group.choices}.isdisjoint(choices)]
    active = request.active = runner.active[held.start_id] = ActiveStart(held.start_id, request, runner, now)
    active.started_at = None
    runner.seats += len(choices)
    runner.kept += (held.start_id,)
    return active


def hold(pool: BlockPool, active: ActiveStart, taken: Taken, quarantine: Quarantine) -> Sequence:
    """The sequence with its blocks. Those that are full and not sealed are its next to seal."""
    held, request = taken.held, active.request
    tag, salt = active.runner.owner_tag, request.salt
    sequence = Sequence(tag, active.start_id, held.choice, taken.tokens, salt, pool.root, held.forks)
    sequence.request_id, sequence.max_length = request.submit.request_id, request.max_length
    for block in held.block_table:
        if pool.state[block] == QUARANTINED:
            pool.take_out_of_quarantine(block, quarantine, sequence)
        else:
            pool.hold(block, sequence)
        sequence.num_sealed += pool.state[block] != RESERVED
    sequence.table = list(held.block_table)
    sequence.num_reused = sequence.num_sealed
    if sequence.num_sealed:
        sequence.last_hash = taken.contents[sequence.num_sealed - 1][0]
    sequence.num_computed = sequence.num_cached = held.num_computed_tokens
    return sequence
