"""Random histories of the whole core with pins that come, go, are replaced and expire, against the naive
model.
"""

import random

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


def walk(seed: int, events: int) -> tuple[PinWorld, int]:
    """A long random history; also how many pins it made."""
    chance = random.Random(seed)
    world = PinWorld(chance.choice([8, 9, 16]))
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


def test_long_histories_reach_every_answer_and_end_well() -> None:
    """Pins are made, refused for each reason, and outlast evictions of the rest."""
    refused: set[str] = set()
    pins = evictions = 0
    for seed in range(10):
        world, made = walk(seed, 500)
        pool = world.core.state.pool
        assert pool is not None
        pins, evictions = pins + made, evictions + pool.evictions
        refused |= world.refused.keys()
        world.finish()
    assert refused == {"not_cached", "pin_budget", "pin_busy", "not_found"}
    assert pins > 50
    assert evictions > 50
