"""Pools whose blocks lie in the memory of one runner's device, and not in `kv.bin`: what they hold goes with
that memory, and no other runner can read it.
"""

from kvmanager.asking import pinning
from kvmanager.pool.block_pool import SEALED
from kvmanager.protocol import Refused, RunnerHello
from kvmanager.scheduling.pins import Job
from kvmanager.state import State


def refusal(state: State, hello: RunnerHello) -> Refused | None:
    """Why this runner cannot be served beside those that are there, or None."""
    for runner in state.runners:
        alone = not (hello.shared_pool and runner.hello.shared_pool)
        if alone and runner.hello.lock != hello.lock:
            return Refused(
                "invalid_request",
                f"{hello.name} and {runner.hello.name} cannot share a pool, as one of them keeps its blocks "
                "in the memory of its device; give each such runner a KV manager and a pool_directory",
            )
    return None


def forget_content(state: State) -> None:
    """The memory is new: nothing is found there any more, and pins end."""
    pool = state.pool
    assert pool is not None
    may_evict, pool.may_evict = pool.may_evict, True  # nobody but its runner reads that memory
    pool.log.cause = "clear"
    for block in list(pool.evictable()):
        pool.evict(block)
    for block, what in enumerate(pool.state):
        if what == SEALED and block not in pool.unfound:
            pool.unfind(block)
    pool.log.cause = "capacity"
    pool.may_evict = may_evict
    state.pins.jobs.append(Job(0, None, pinning.end_pins(state)))
