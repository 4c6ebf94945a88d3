"""Random histories of the core with a tier below its pool, against the naive model."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.kvmanager.fake_clients import FakeFrontend, FakeRunner, submission
from tests.kvmanager.test_core_machine import CoreMachine
from tests.kvmanager.tier_world import TierWorld

RESUME = st.sampled_from(["auto", "promote", "recompute"])


class TieringMachine(CoreMachine):
    """All that may happen without a tier, and copies that end in any order, fail or are cut short."""

    world: TierWorld

    @initialize(num_blocks=st.integers(6, 20), num_slots=st.sampled_from([1, 4, 50]), resume=RESUME)
    def begin(self, num_blocks: int, num_slots: int, resume: str) -> None:  # type: ignore[override]
        self.world = TierWorld(num_blocks, num_slots, resume)
        self.count = 0
        for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
            self.world.add(kind)

    @precondition(lambda self: self.world.copies)
    @rule(index=st.integers(0, 20), good=st.sampled_from([True, True, True, False]))
    def end_copy(self, index: int, good: bool) -> None:
        self.world.end_copy(index, good)

    @rule(how_far=st.integers(0, 2))
    def cut_short(self, how_far: int) -> None:
        self.world.cut_short(how_far)

    @rule()
    def wait_too_long(self) -> None:
        self.world.wait(3.0)


TieringMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTieringMachine = TieringMachine.TestCase


def walk(seed: int, events: int) -> tuple[TierWorld, list[int]]:
    """A long random history; with it how many blocks went down and came back."""
    chance = random.Random(seed)
    world = TierWorld(
        chance.choice([12, 16, 40]), chance.choice([6, 300]), chance.choice(["auto", "promote"])
    )
    totals = [0, 0]
    for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
        world.add(kind)
    for event in range(events):
        process = chance.choice(list(world.processes.values()))
        dice = chance.random()
        if dice < 0.003:
            totals = [totals[0] + world.tier.demotions, totals[1] + world.tier.promotions]
            world.cut_short(chance.randrange(3))
        elif dice < 0.4 and world.copies:
            world.end_copy(chance.randrange(20), chance.random() < 0.9)
        elif isinstance(process, FakeRunner):
            process.step(chance.randrange(3))
        elif isinstance(process, FakeFrontend):
            process.read()
            if dice < 0.5:
                prompt = [event // 40 % 5] * chance.randrange(12) + chance.choices(range(2), k=4)
                process.submit(
                    submission(f"r{event}", prompt, max_tokens=chance.randrange(1, 16), arrival=world.now)
                )
        world.check()
    return world, [totals[0] + world.tier.demotions, totals[1] + world.tier.promotions]


@pytest.mark.parametrize("seed", range(8))
def test_long_random_histories_end_well(seed: int) -> None:
    walk(seed, 600)[0].finish()


def test_histories_go_down_and_up() -> None:
    totals = [walk(seed, 400)[1] for seed in range(6)]
    assert all(map(sum, zip(*totals, strict=True))), totals
