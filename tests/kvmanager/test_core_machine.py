"""Random histories of the whole core against the naive model of `world`."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kvmanager.fake_clients import FakeFrontend, FakeRunner, submission
from tests.kvmanager.world import World

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18)


class CoreMachine(RuleBasedStateMachine):
    """Two or more runners and frontends, a pool that is too small, and any of them may die at any time."""

    @initialize(num_blocks=st.integers(6, 20))
    def begin(self, num_blocks: int) -> None:
        self.world = World(num_blocks)
        self.count = 0
        for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
            self.world.add(kind)

    def pick(self, kind: type[Any], index: int) -> Any:
        found = self.world.of_kind(kind)
        return found[index % len(found)] if found else None

    @rule(
        frontend=st.integers(0, 3),
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        n=st.integers(1, 3),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 1),
        read_cache=st.sampled_from([True, True, True, False]),
    )
    def submit(self, frontend, prompt, max_tokens, n, salt, priority, read_cache) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None:
            self.count += 1
            found.submit(
                submission(
                    f"r{self.count}",
                    prompt,
                    max_tokens=max_tokens,
                    n=n,
                    arrival=self.world.now,
                    salt=salt,
                    priority=priority,
                    read_cache=read_cache,
                )
            )

    @rule(frontend=st.integers(0, 3), index=st.integers(0, 5))
    def cancel(self, frontend, index) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None and found.requests:
            found.cancel(list(found.requests)[index % len(found.requests)])

    @rule(frontend=st.integers(0, 3), index=st.integers(0, 5))
    def resubmit(self, frontend, index) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None and found.requests:
            found.resubmit(list(found.requests)[index % len(found.requests)])

    @rule(runner=st.integers(0, 3), ahead=st.integers(0, 3), steps=st.integers(1, 4))
    def step(self, runner, ahead, steps) -> None:
        found = self.pick(FakeRunner, runner)
        for _ in range(steps if found is not None else 0):
            found.step(ahead)

    @rule(frontend=st.integers(0, 3))
    def read(self, frontend) -> None:
        found = self.pick(FakeFrontend, frontend)
        if found is not None:
            found.read()

    @rule(kind=st.sampled_from([FakeRunner, FakeFrontend]), index=st.integers(0, 3))
    def kill(self, kind, index) -> None:
        found = self.pick(kind, index)
        if found is not None:
            self.world.kill(found)

    @precondition(lambda self: len(self.world.processes) < 7)
    @rule(kind=st.sampled_from([FakeRunner, FakeFrontend]))
    def add(self, kind) -> None:
        self.world.add(kind)

    @rule(runner=st.integers(0, 3))
    def drain(self, runner) -> None:
        found = self.pick(FakeRunner, runner)
        if found is not None:
            found.drain()

    @rule()
    def wait(self) -> None:
        self.world.wait(100.0)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


CoreMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCoreMachine = CoreMachine.TestCase


def walk(seed: int, events: int) -> World:
    """A long random history with kills and restarts; many more runs of steps than anything else."""
    chance = random.Random(seed)
    world = World(chance.choice([8, 16, 40]))
    for kind in (FakeRunner, FakeRunner, FakeFrontend, FakeFrontend):
        world.add(kind)
    for event in range(events):
        process = chance.choice(list(world.processes.values()))
        dice = chance.random()
        if dice < 0.004:
            world.restart()
        elif dice > 0.99:
            world.wait(100.0)
        elif dice < 0.012 and len(world.of_kind(type(process))) > 1:
            world.kill(process)
            world.add(type(process))
        elif isinstance(process, FakeRunner):
            process.step(chance.randrange(3))
        elif isinstance(process, FakeFrontend):
            process.read()
            if dice < 0.3:
                prompt = [0] * chance.randrange(12) + [
                    chance.randrange(2) for _ in range(chance.randrange(1, 8))
                ]
                n = chance.choice([1, 1, 1, 2, 4])
                process.submit(
                    submission(
                        f"r{event}", prompt, max_tokens=chance.randrange(1, 16), n=n, arrival=world.now
                    )
                )
            elif dice < 0.35 and process.requests:
                process.cancel(chance.choice(list(process.requests)))
        world.check()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_long_random_histories_end_well(seed: int) -> None:
    walk(seed, 600).finish()


def test_histories_reach_every_kind_of_event() -> None:
    """The random histories are worth something only if hits, evictions and preemptions happen in them."""
    totals = [0] * 6
    for seed in range(12):
        state = walk(seed, 300).core.state
        assert state.pool is not None
        totals[0] += state.counters.prefix_cache_hits
        totals[1] += state.pool.evictions
        totals[2] += state.counters.preemptions
        totals[3] += state.counters.prefix_waits
        totals[4] += state.counters.recomputed_tokens
        totals[5] += sum(map(state.pool.is_partial, range(state.pool.num_blocks)))
    assert all(totals), totals
