"""Random histories of the whole core with pins that come, go, are replaced and expire, against the naive
model.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.kvmanager.fake_clients import FakeFrontend, FakeRunner, submission
from tests.kvmanager.pin_world import LONGEST, PinWorld
from tests.kvmanager.test_core_machine import PROMPTS, CoreMachine

NAMES = st.sampled_from(["one", "two", "three"])


class PinMachine(CoreMachine):
    """As without pins, and everything pinned stays."""

    @initialize(num_blocks=st.integers(6, 20))
    def begin(self, num_blocks: int) -> None:
        self.world = PinWorld(num_blocks)
        self.count = 0
        for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
            self.world.add(kind)

    @rule(
        frontend=st.integers(0, 3),
        name=NAMES,
        prompt=PROMPTS,
        salt=st.sampled_from(["", "", "a"]),
        ttl=st.sampled_from([0.01, 50.0, LONGEST]),
    )
    def pin(self, frontend, name, prompt, salt, ttl) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None:
            self.world.pin(found, name, tuple(prompt), salt, ttl)

    @rule(frontend=st.integers(0, 3), name=NAMES)
    def unpin(self, frontend, name) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None:
            self.world.unpin(found, name)


PinMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPinMachine = PinMachine.TestCase


def walk(seed: int, events: int, part: int) -> tuple[PinWorld, int]:
    """A long random history; also how many pins it made. If `part` is 1, they take several messages and
    ticks, and something happens between these.
    """
    chance = random.Random(seed)
    world = PinWorld(chance.choice([8, 9, 16]), part)
    world.disturbed = part == 1

    def happen() -> None:
        dice = chance.random() if world.disturbed else 1.0
        if dice < 0.02:
            world.restart()
        elif dice < 0.05:
            (frontend,) = world.of_kind(FakeFrontend)
            world.kill(frontend)
            world.add(FakeFrontend)
        elif dice < 0.5:
            chance.choice(world.of_kind(FakeRunner)).step(chance.randrange(3))

    world.between = happen
    made = 0
    for kind in (FakeRunner, FakeRunner, FakeFrontend):
        world.add(kind)
    for event in range(events):
        dice = chance.random()
        (frontend,) = world.of_kind(FakeFrontend)
        prompt = [0] * chance.randrange(12) + [chance.randrange(2) for _ in range(chance.randrange(1, 8))]
        if dice < 0.01:
            world.restart()
        elif dice < 0.03:
            world.wait(chance.choice([1.0, 100.0]))
        elif dice < 0.15:
            before = len(world.kept)
            world.pin(frontend, chance.choice("abc"), tuple(prompt), "", chance.choice([0.01, 50.0, 500.0]))
            made += len(world.kept) > before
        elif dice < 0.18:
            world.unpin(frontend, chance.choice("abc"))
        elif dice < 0.35:
            tokens = chance.randrange(1, 10)
            frontend.submit(submission(f"r{event}", prompt, max_tokens=tokens, arrival=world.now))
        else:
            frontend.read()
            chance.choice(world.of_kind(FakeRunner)).step(chance.randrange(3))
        world.check()
    return world, made


@pytest.mark.parametrize("part", [256, 1])
def test_long_histories_reach_every_answer_and_end_well(part: int) -> None:
    """Pins are made, refused for each reason, and outlast evictions of the rest; be it that they are made at
    once, or block by block, with everything that may happen meanwhile.
    """
    refused: set[str] = set()
    made = evictions = 0
    for seed in range(8):
        world, more = walk(seed, 400, part)
        pool = world.core.state.pool
        assert pool is not None
        made, evictions = made + more, evictions + pool.evictions
        refused |= world.refused.keys()
        world.finish()
    assert refused == {"not_cached", "pin_budget", "pin_busy", "not_found"}
    assert made > 30
    assert evictions > 30
