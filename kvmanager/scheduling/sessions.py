"""Sessions: Hello, and what becomes of a client's requests, starts and blocks when its session ends."""

from msgspec.structs import replace

from kvmanager.pool.block_pool import RESERVED
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Fenced,
    Hello,
    Refused,
    RunnerHello,
    RunnerLost,
    Session,
    Welcome,
)
from kvmanager.scheduling import device_memory
from kvmanager.scheduling.clients import Client, Frontend, Quarantine, Runner
from kvmanager.scheduling.requests import RequestState, StartState
from kvmanager.state import State


def refusal(state: State, hello: Hello) -> Refused | None:
    """Why this Hello cannot be served, or None."""
    if hello.version != PROTOCOL_VERSION:
        return Refused(
            "version",
            f"{hello.name} speaks protocol version {hello.version} and the KV manager {PROTOCOL_VERSION}: "
            "install the same release of both",
        )
    if not isinstance(hello, RunnerHello):
        return None
    if hello.max_num_seqs < 1 or hello.max_model_len < 1:
        return Refused("invalid_request", f"{hello.name}: max_num_seqs and max_model_len must be at least 1")
    if (refused := device_memory.refusal(state, hello)) is not None:
        return refused
    if state.pool is not None and hello.layout != state.pool.layout:
        names = [
            name for name in hello.layout.__struct_fields__ if differ(hello.layout, state.pool.layout, name)
        ]
        parts = ", ".join(
            f"{name} {getattr(state.pool.layout, name)} there and {getattr(hello.layout, name)} here"
            for name in names
        )
        return Refused(
            "other_layout",
            f"the pool directory holds blocks of another layout ({parts}); "
            "choose another pool_directory, or start the manager with reset_pool to empty it",
        )
    return None


def differ(one: object, other: object, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def welcome(state: State, hello: Hello, now: float) -> Welcome | Session:
    """Register the client. Whoever had this lock before is gone, or starts over: its session ends.

    The same Hello again before anything else was sent gets the same answer again. A runner that re-asserts
    its holdings gets a session, and its Welcome when the roll call is over.
    """
    client = state.by_lock.get(hello.lock)
    if client is None or client.hello != hello or client.touched:
        if client is not None:
            supersede(state, client, now)
        state.last_client_id += 1
        client = register(state, hello, now)
    if state.roll_call is not None and isinstance(client, Runner):
        state.roll_call.spoke(hello.lock)
        if client.hello.holdings is not None:
            state.roll_call.holdings[client] = client.hello.holdings
            return session_of(state, client)
    if isinstance(client, Runner):
        repeat(client)
    return welcome_to(state, client)


def repeat(runner: Runner) -> None:
    """What a runner was told with a Welcome that may have been lost."""
    for active in runner.active.values():
        if active.state is StartState.CANCELLING:
            runner.outbox.cancels += (active.start_id,)
        elif active.state is StartState.PREEMPTING:
            runner.outbox.preempts += (active.start_id,)


def session_of(state: State, client: Client) -> Session:
    return Session(state.boot_id, client.client_id, client.client_id)


def welcome_to(state: State, client: Client) -> Welcome:
    """A runner that keeps nothing begins with new memory, where its pool is that of its device."""
    if isinstance(client, Runner) and not (client.hello.shared_pool or client.kept):
        device_memory.forget_content(state)
    num_blocks = state.pool.num_blocks if state.pool is not None else 0
    kept = client.kept if isinstance(client, Runner) else ()
    return Welcome(session_of(state, client), state.pool_directory, num_blocks, kept)


def register(state: State, hello: Hello, now: float) -> Client:
    client: Client
    if isinstance(hello, RunnerHello):
        client = Runner(state.last_client_id, hello, now)
        state.runners.append(client)
        state.last_runner_seen = now
    else:
        client = Frontend(state.last_client_id, hello)
    state.clients[client.client_id] = client
    state.by_lock[hello.lock] = client
    return client


def supersede(state: State, client: Client, now: float) -> None:
    """A Hello ends the session before it. It may have come late, past one that its sender (or the next
    process of that name) still works under: blocks are taken back when the new session is used.
    """
    if isinstance(client, Runner):
        end_runner(state, client, quarantine_of(state, client.hello.lock), now)
    else:
        end_frontend(state, client)


def confirm(state: State, client: Client) -> None:
    """The first message under a session: its process knows of it, and has dropped all it had before."""
    client.touched = True
    if isinstance(client, Runner) and client.hello.holdings is not None:
        client.hello = replace(client.hello, holdings=None)  # they may be large
    take_back(state, client.hello.lock)


def gone(state: State, lock: str, now: float) -> None:
    """The process with this lock has died: take everything back."""
    client = state.by_lock.get(lock)
    if isinstance(client, Runner):
        end_runner(state, client, None, now)
    elif client is not None:
        end_frontend(state, client)
    if state.roll_call is not None:
        state.roll_call.spoke(lock)
    take_back(state, lock)


def displace(state: State, lock: str, former: str, now: float) -> None:
    """The process that had this lock lives under the name `former`, which dies with it: until then what it
    had stays out of use, whoever has the lock now.
    """
    quarantine = state.quarantines.pop(lock, None) or Quarantine(former)
    quarantine.lock = former
    state.quarantines[former] = quarantine
    if lock in state.survivors:
        state.survivors.remove(lock)
        state.survivors.add(former)
    client = state.by_lock.get(lock)
    if isinstance(client, Runner):
        end_runner(state, client, quarantine, now)
    elif client is not None:
        end_frontend(state, client)


def take_back(state: State, lock: str) -> None:
    """Nobody uses any more what the process with this lock had under earlier sessions."""
    state.survivors.discard(lock)
    if state.pool is not None:
        state.pool.may_evict = not state.survivors
    release_quarantine(state, lock)
    if not state.survivors:
        release_quarantine(state, "")  # damaged records: any of the survivors might have written there
    state.admission_due = True


def release_quarantine(state: State, lock: str) -> None:
    quarantine = state.quarantines.pop(lock, None)
    if quarantine is not None:
        assert state.pool is not None
        for block in quarantine.blocks:
            state.pool.release(block, quarantine)


def fence(state: State, runner: Runner, now: float) -> None:
    """End the session of a runner that lives but cannot be trusted. It may still use its blocks: quarantine
    them.
    """
    state.send(runner, Fenced(state.boot_id))
    end_runner(state, runner, quarantine_of(state, runner.hello.lock), now)


def quarantine_of(state: State, lock: str) -> Quarantine:
    return state.quarantines.setdefault(lock, Quarantine(lock))


def end_runner(state: State, runner: Runner, quarantine: Quarantine | None, now: float) -> None:
    """Let go of all blocks (sealed ones stay cached) and tell frontends which requests to submit again.

    Those that have finished are among them: a frontend that has all their tokens has forgotten them.
    """
    pool = state.pool
    assert pool is not None
    lost: dict[int, list[tuple[str, int]]] = {}
    sequences = [sequence for active in runner.active.values() for sequence in active.sequences.values()]
    read = [sequence.source for sequence in sequences if sequence.source is not None]
    for block in (*runner.credits, *read, *(block for sequence in sequences for block in sequence.table)):
        if quarantine is not None and quarantine not in pool.ledger.holders(block):
            pool.hold(block, quarantine)
            quarantine.blocks.append(block)
            if pool.state[block] == RESERVED:
                pool.quarantine(block)
    for block in runner.credits:
        pool.release(block, runner)
    for sequence in sequences:
        sequence.release(pool)
    for active in runner.active.values():
        request = active.request
        request.active = None
        state.withdraw(active)
        if request.state is not RequestState.GONE:
            state.forget(request)
            entry = (request.submit.request_id, request.submit.attempt)
            lost.setdefault(request.frontend.client_id, []).append(entry)
    for client_id, request_id, attempt in runner.finished:
        if client_id in state.clients:
            lost.setdefault(client_id, []).append((request_id, attempt))
    for client_id, requests in lost.items():
        state.send(state.clients[client_id], RunnerLost(tuple(dict.fromkeys(requests))))
    state.runners.remove(runner)
    state.last_runner_seen = now
    unregister(state, runner)


def end_frontend(state: State, frontend: Frontend) -> None:
    """Cancel all its requests."""
    for request in list(frontend.requests.values()):
        state.cancel(request)
    unregister(state, frontend)


def unregister(state: State, client: Client) -> None:
    if state.roll_call is not None:
        state.roll_call.leave(client)
    del state.clients[client.client_id]
    del state.by_lock[client.hello.lock]
    state.effects.ended += (client.client_id,)
    state.admission_due = True
