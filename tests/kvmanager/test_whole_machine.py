"""Random histories of the whole core: sequences that fork, are preempted and cancelled, blocks that go down
to the tier and come back, pins, deaths and restarts, all against the naive model.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.kvmanager.fake_clients import FakeFrontend, FakeRunner, submission
from tests.kvmanager.pin_world import PinWorld
from tests.kvmanager.test_pins_machine import PinMachine
from tests.kvmanager.test_tiering_machine import RESUME, TieringMachine
from tests.kvmanager.tier_world import TierWorld


class WholeWorld(PinWorld, TierWorld):
    """Pins, and a tier below."""

    def __init__(self, num_blocks: int, num_slots: int, resume: str) -> None:
        self.kept, self.refused = {}, {}
        TierWorld.__init__(self, num_blocks, num_slots, resume)


class WholeMachine(PinMachine, TieringMachine):
    """All rules of both."""

    world: WholeWorld

    @initialize(num_blocks=st.integers(6, 20), num_slots=st.sampled_from([1, 4, 50]), resume=RESUME)
    def begin(self, num_blocks: int, num_slots: int, resume: str) -> None:
        self.world = WholeWorld(num_blocks, num_slots, resume)
        self.count = 0
        for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
            self.world.add(kind)


WholeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestWholeMachine = WholeMachine.TestCase


def walk(seed: int, events: int) -> tuple[WholeWorld, dict[str, int]]:
    """A long random history, and how often what it is about has happened."""
    chance = random.Random(seed)
    world = WholeWorld(
        chance.choice([12, 16, 40]), chance.choice([6, 300]), chance.choice(["auto", "promote"])
    )
    met = dict.fromkeys(("demotions", "promotions", "preemptions", "pins", "forks"), 0)
    for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
        world.add(kind)

    def count() -> None:
        met["demotions"] += world.tier.demotions
        met["promotions"] += world.tier.promotions
        met["preemptions"] += world.core.state.counters.preemptions

    for event in range(events):
        process = chance.choice(list(world.processes.values()))
        prompt = [event // 40 % 5] * chance.randrange(12) + chance.choices(range(2), k=4)
        dice = chance.random()
        if dice < 0.004:
            count()
            world.cut_short(chance.randrange(3))
        elif dice < 0.008:
            world.wait(3.0)
        elif dice < 0.35 and world.copies:
            world.end_copy(chance.randrange(20), chance.random() < 0.9)
        elif isinstance(process, FakeRunner):
            process.step(chance.randrange(3))
        elif isinstance(process, FakeFrontend):
            process.read()
            if dice < 0.6:
                n = chance.choice([1, 1, 2, 3])
                met["forks"] += n > 1
                process.submit(
                    submission(
                        f"r{event}", prompt, max_tokens=chance.randrange(1, 16), n=n, arrival=world.now
                    )
                )
            elif dice < 0.63 and process.requests:
                process.cancel(chance.choice(list(process.requests)))
            elif dice < 0.7:
                before = len(world.kept)
                world.pin(
                    process, chance.choice("abc"), tuple(prompt), "", chance.choice([0.01, 50.0, 500.0])
                )
                met["pins"] += len(world.kept) > before
            elif dice < 0.72:
                world.unpin(process, chance.choice("abc"))
        world.check()
    count()
    return world, met


@pytest.mark.parametrize("seed", range(6))
def test_long_random_histories_end_well(seed: int) -> None:
    walk(seed, 600)[0].finish()


def test_histories_have_something_of_everything() -> None:
    totals = [walk(seed, 400)[1] for seed in range(5)]
    assert all(sum(met[name] for met in totals) > 5 for name in totals[0]), totals
