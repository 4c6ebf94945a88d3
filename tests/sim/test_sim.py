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

from tests.sim.simulate import SimulationError, simulate
from tests.sim.world import World

MESSAGES = int(os.environ.get("PAGEKEEPER_SIM_MESSAGES", "300000"))
FIRST_SEED = int(os.environ.get("PAGEKEEPER_SIM_SEED", time.time_ns() // 1_000_000 % 1_000_000_000))
PARTS = 10
PER_SEED = 3000  # messages

MET = ("finished", "preemptions", "hit tokens", "evictions", "fenced", "refused", "stalls", "breaks")
KILLS = ("manager kills", "runner kills", "frontend kills")
total: Counter[str] = Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_seeds(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A full audit after each event at the manager, and each read and write of a block checked."""
    seeds = max(1, MESSAGES // PARTS // PER_SEED)
    first = FIRST_SEED + part * seeds
    with capsys.disabled():
        print(f" seeds {first} to {first + seeds - 1}", end="", flush=True)
    for seed in range(first, first + seeds):
        total.update(simulate(seed, PER_SEED))


def test_the_seeds_have_met_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the seeds: enough messages, enough deaths of each kind, and every kind of event."""
    with capsys.disabled():
        print(f" {dict(sorted(total.items()))}", end="", flush=True)
    assert total["messages"] >= min(MESSAGES, PARTS * PER_SEED)
    assert [name for name in MET if not total[name]] == []
    assert [name for name in KILLS if total[name] < total["messages"] / 150] == []


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


def test_a_failure_names_its_seed_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a manager that grants a block which somebody still writes: the simulator sees it."""

    def no_quarantine(world: World) -> None:
        assert world.messages < 200, "made to fail"

    monkeypatch.setattr(World, "_check", no_quarantine)
    with pytest.raises(SimulationError, match=r"seed 3 fails .*made to fail[^$]*--seed 3 --steps 1000"):
        simulate(3, 1000)
