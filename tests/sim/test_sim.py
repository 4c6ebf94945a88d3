"""Many seeds of the simulator, others in each run, so that in time every race is met. A failure names its
seed.

`PAGEKEEPER_SIM_MESSAGES` sets how many messages there are in all, `PAGEKEEPER_SIM_SEED` the first seed.
"""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from gpu_runner.request import RunningSequence
from gpu_runner.scheduler import Scheduler
from gpu_runner.shared_tails import SharedTails
from kvmanager.core import Core
from kvmanager.pool.ledger import Ledger
from kvmanager.scheduling import admission, requests, sessions
from kvmanager.scheduling.takeover import Takeover
from kvmanager.state import Effects, State
from kvmanager.tier.tiers import Copy
from tests.sim.simulate import SimulationError, simulate

MESSAGES = int(os.environ.get("PAGEKEEPER_SIM_MESSAGES", "300000"))
FIRST_SEED = int(os.environ.get("PAGEKEEPER_SIM_SEED", time.time_ns() // 1_000_000 % 1_000_000_000))
PER_SEED = 3000  # messages
TIMEOUT = 300 + MESSAGES // 200  # seconds; many times what it takes

MET = (
    *(
        "finished",
        "finished searches",
        "preemptions",
        "hit tokens",
        "evictions",
        "fenced",
        "refused",
        "stalls",
        "breaks",
    ),
    *(
        "pins",
        "pins pin_budget",
        "pins not_cached",
        "handed over",
        "handed on",
        "searches handed on",
        "starts taken over",
        "copied tails",
        "prefix waits",
        "recomputed tokens",
        "demotions",
        "promotions",
    ),
)
KILLS = ("manager kills", "runner kills", "frontend kills")
MESSAGES_PER_KILL = 150  # at most, for each kind: 2,000 kills in 300,000 messages


@pytest.mark.timeout(TIMEOUT)
def test_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """A full audit after each event at the manager, and each read and write of a block checked; at the end
    of each seed every request has the text of an undisturbed run, and no block is held.
    """
    total: Counter[str] = Counter()
    seed = FIRST_SEED
    while total["messages"] < MESSAGES:
        total.update(simulate(seed, PER_SEED))
        seed += 1
    with capsys.disabled():
        print(f"\nseeds {FIRST_SEED} to {seed - 1}: {dict(sorted(total.items()))}")
    if MESSAGES >= 100_000:
        assert [name for name in MET if not total[name]] == []
        assert [name for name in KILLS if total[name] * MESSAGES_PER_KILL < total["messages"]] == []


def test_a_seed_replays_exactly_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seed", "7", "--steps", "1500", "--verbose"]
    outputs = [
        subprocess.run(
            command, capture_output=True, check=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": salt}
        ).stdout.splitlines()[:-1]  # the last line says how long it took
        for salt in ("1", "2")
    ]
    assert len(outputs[0]) > 1500
    assert outputs[0] == outputs[1]


def copied_well(core: Core, now: float, copy: Copy, promotion: bool, good: bool, seconds: float) -> Effects:
    return COPIED(core, now, copy, promotion, True, seconds)


def gone_with_its_blocks(state: State, lock: str, now: float) -> None:
    """Nothing that was sealed under the process is found any more."""
    pool, client = state.pool, state.by_lock.get(lock)
    for active in state.actives() if pool is not None else ():
        for sequence in active.sequences.values() if active.runner is client else ():
            pool.log.cause = "clear"
            for block in sequence.table:
                if pool.block_hash[block] and block not in pool.unfound:
                    pool.unfind(block)
            pool.log.cause = "capacity"
    GONE(state, lock, now)


COPIED = Core.copied
GONE = sessions.gone
PLANTED = {
    "a shared tail is written in place": (SharedTails, "is_shared", lambda self, block: False),
    "salts are ignored": (requests, "salt_digest", lambda salt: b""),
    "a tail is not copied": (
        RunningSequence,
        "first_copy",
        lambda self: (self.sequence.block_table[-1],) * 2,
    ),
    "nobody waits for a prefix": (admission, "in_flight", lambda state, pool, request, plan: None),
    "the tail that others write on is sealed": (Ledger, "ref_count", lambda self, block: 1),
    "a dead runner's blocks are forgotten": (sessions, "gone", gone_with_its_blocks),
    "what a failed copy has left is content": (Core, "copied", copied_well),
    "a fenced runner's blocks are reused": (sessions, "quarantine_of", lambda state, lock: None),
    "what a runner holds is believed": (Takeover, "_is_sound", lambda self, request, taken: True),
    "a runner goes on with what is not taken over": (Scheduler, "keep_only", lambda self, start_ids: None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within a few seeds, which the failure names with the command that replays it."""
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(SimulationError, match=r"(?s)seed \d+ fails after .* --seed \d+ --steps 2000 "):
        simulate_many(range(60), 2000)


def simulate_many(seeds: range, num_messages: int) -> None:
    for seed in seeds:
        simulate(seed, num_messages)
