"""When there is no room: credits are granted as far as blocks go, and then a running request gives way: to
those that run, or to one of a higher priority that waits.
"""

from kvmanager.asking.event_log import NOBODY, Asker
from kvmanager.pool.block_pool import BlockPool
from kvmanager.scheduling.clients import Runner
from kvmanager.scheduling.requests import ActiveStart, Request, StartState
from kvmanager.state import State

SILENCE = 1.0  # seconds after which a runner is not waited for: nothing that it was told will happen soon


def grant_credits(state: State, pool: BlockPool) -> bool:
    """Give every runner the credits that it wants, as far as there are blocks. True if one has none then."""
    starved = False
    for runner in state.runners:
        missing = runner.credits_wanted - len(runner.credits)
        if missing > 0:
            pool.log.asker = sole_request(runner)
            blocks = pool.grant_all(min(missing, pool.available), runner)
            runner.credits.update(blocks)
            runner.outbox.credits += pool.refs(blocks)
            pool.log.asker = NOBODY
            starved |= not runner.credits
    return starved


def sole_request(runner: Runner) -> Asker:
    """For whom the runner wants credits, if it runs nothing else."""
    if len(runner.active) != 1:
        return NOBODY
    (active,) = runner.active.values()
    return Asker(active.request.submit.request_id, active.request.salt)


def relieve(state: State, now: float) -> None:
    """As a runner that wants credits has none, preempt a request, unless one is giving way already.

    Not the only running one: it fits into the pool, and what it lacks is on its way back from somewhere else.
    """
    if blocks_return(state, now):
        return
    running = settled(state, now)
    if len(running) > 1:
        preempt(state, max(running, key=order))


def expected_growth(state: State, pool: BlockPool, request: Request) -> int:
    """Blocks that what runs and `request` will need beyond those that have ended until then give back, when
    that is most.

    All are taken to get a token per step, and each as many as is usual. What they begin with may be shared,
    and so does not come back for sure.
    """
    size, share = pool.block_size, state.usual_share
    streams = [
        (
            share * (active.request.max_length - len(sequence.tokens)),
            len(sequence.table) - sequence.num_reused,
        )
        for active in state.actives()
        for sequence in active.sequences.values()
        for _ in range(1 + len(sequence.pending_forks))
    ]
    streams += [
        (share * (request.max_length - len(group.tokens)), 0)
        for group in request.groups
        for _ in group.choices
    ]
    streams.sort()
    growing, returned, most = len(streams), 0.0, 0.0
    for left, held in streams:
        most = max(most, growing * left / size - returned)
        returned += held + left / size
        growing -= 1
    return int(most)


def settled(state: State, now: float) -> list[ActiveStart]:
    """What runs, on runners that are heard of; none if some of that is giving way already."""
    actives = [active for active in state.actives() if now - active.runner.last_heard < SILENCE]
    if any(active.state is not StartState.RUNNING for active in actives):
        return []
    return actives


def blocks_return(state: State, now: float) -> bool:
    """Whether blocks come back in a moment, as they are only being copied to the tier."""
    return state.tiering is not None and state.tiering.blocks_return(now)


def order(active: ActiveStart) -> tuple[int, float, int]:
    return active.request.order


def seat_victims(state: State, request: Request, now: float) -> tuple[ActiveStart, ...]:
    """What has to give way, one after the other, so that a runner could take this request: the last of a
    lower priority first. Empty where that would not do.
    """
    yielding = lower(state, request, now)
    able = [runner for runner in state.runners if seats_for(runner, request, yielding)]
    victims = sorted((active for active in yielding if active.runner in able), key=order, reverse=True)
    for count in range(1, len(victims)):
        if any(seats_for(runner, request, victims[:count]) for runner in able):
            return tuple(victims[:count])
    return tuple(victims)


def block_victims(
    state: State, pool: BlockPool, request: Request, needed: int, now: float
) -> tuple[ActiveStart, ...]:
    """What has to give way, one after the other, for a request that needs so many blocks: the last of a lower
    priority first. Empty where all those together do not hold enough, or blocks come back anyhow.
    """
    victims: list[ActiveStart] = []
    held: set[int] = set()
    yielding = () if blocks_return(state, now) else lower(state, request, now)
    for active in sorted(yielding, key=order, reverse=True):
        if victims and pool.available + len(held) >= needed:
            break
        victims.append(active)
        held.update(block for sequence in active.sequences.values() for block in sequence.table)
    return tuple(victims) if pool.available + len(held) >= needed else ()


def lower(state: State, request: Request, now: float) -> list[ActiveStart]:
    """What runs with a lower priority than the request's."""
    priority = request.submit.priority
    return [active for active in settled(state, now) if active.request.submit.priority > priority]


def seats_for(runner: Runner, request: Request, yielding: list[ActiveStart]) -> bool:
    """Whether the runner could take the request if all of `yielding` that it has had left."""
    free = runner.free_seats()
    for active in yielding:
        if active.runner is runner:
            free += sum(1 + len(sequence.pending_forks) for sequence in active.sequences.values())
    able = runner.ready and not runner.draining and runner.hello.max_model_len >= request.max_length
    return able and free >= request.num_choices


def preempt(state: State, active: ActiveStart) -> None:
    """Make this request give way."""
    stop(state, active)
    active.request.preemptions += 1
    state.counters.preemptions += 1


def hand_over(state: State, runner: Runner) -> None:
    """The runner is about to end: what it runs goes on elsewhere, each request in its old place."""
    runner.draining = True
    runner.credits_wanted = 0
    for active in runner.active.values():
        if active.state is StartState.RUNNING:
            stop(state, active)


def stop(state: State, active: ActiveStart) -> None:
    """Tell the runner to stop this request, which waits then; its blocks come back when it acknowledges."""
    active.state = StartState.PREEMPTING
    state.withdraw(active)
    active.runner.outbox.preempts += (active.start_id,)
