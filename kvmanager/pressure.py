"""When blocks run out: credits are granted as far as blocks go, and then a running request gives way."""

from kvmanager.block_pool import BlockPool
from kvmanager.requests import ActiveStart, StartState
from kvmanager.state import State

SILENCE = 1.0  # seconds after which a runner is not waited for: nothing that it was told will happen soon


def grant_credits(state: State, pool: BlockPool) -> None:
    """Give every runner the credits that it wants, as far as there are blocks."""
    for runner in state.runners:
        missing = runner.credits_wanted - len(runner.credits)
        for _ in range(min(missing, pool.available) if missing > 0 else 0):
            block = pool.grant(runner)
            runner.credits.add(block)
            runner.outbox.credits.append(pool.ref(block))


def relieve(state: State, pool: BlockPool, now: float) -> None:
    """If a runner that wants credits has none left, preempt a request, unless one is giving way already.

    Not the only running one: it fits into the pool, and what it lacks is on its way back from somewhere else.
    """
    if pool.available or not any(runner.credits_wanted and not runner.credits for runner in state.runners):
        return
    actives = [active for active in state.actives() if now - active.runner.last_heard < SILENCE]
    running = [active for active in actives if active.state is StartState.RUNNING]
    if len(running) < len(actives) or len(running) < 2:
        return
    preempt(state, max(running, key=lambda active: active.request.order))


def preempt(state: State, active: ActiveStart) -> None:
    """Tell the runner to stop this request; its blocks come back when it acknowledges."""
    active.state = StartState.PREEMPTING
    state.withdraw(active)
    active.runner.outbox.preempts.append(active.start_id)
    active.request.preemptions += 1
    state.counters.preemptions += 1
