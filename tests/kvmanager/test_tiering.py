"""The core and the tier below its pool, by example: what is copied down, what comes back, who waits."""

from typing import Any

import pytest

from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, RESERVED, SEALED, BlockPool
from kvmanager.protocol import Cancel, Progress, Start, StepReport, Taken
from kvmanager.state import Effects, Policy
from kvmanager.tier.tiering import MAX_WAIT
from kvmanager.tier.tiers import MAX_DEMOTIONS, Copy, Tier
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene


class TierScene(Scene):
    """Copies stay under way until the test ends them."""

    def __init__(self, num_blocks: int = 16, num_slots: int = 64, **policy: Any) -> None:
        self.down: list[Copy] = []
        self.up: list[Copy] = []
        super().__init__(0, **policy)
        self.tier = Tier(num_slots)
        self.core.attach(BlockPool(num_blocks, LAYOUT), tier=self.tier)
        self.front, self.run_on = self.frontend(), self.runner()

    def take(self, effects: Effects) -> None:
        self.down += effects.demotions
        self.up += effects.promotions
        super().take(effects)

    def end_copy(self, copy: Copy, good: bool = True, seconds: float = 0.001) -> None:
        promotion = copy in self.up
        (self.up if promotion else self.down).remove(copy)
        self.take(self.core.copied(self.now, copy, promotion, good, seconds))

    def settle(self) -> None:
        """End all copies, and those that they bring about."""
        while self.down or self.up:
            self.end_copy((self.up or self.down)[0])

    def compute(self, name: str, prompt: list[int]) -> None:
        self.run(self.front, self.run_on, submission(name, prompt))
        self.settle()

    def ask(self, name: str, prompt: list[int], **fields: Any) -> None:
        self.send(self.front, submission(name, prompt, **fields))

    def starts(self) -> list[Start]:
        return [start for message in self.received(self.run_on) for start in message.starts]

    def evict_all(self) -> None:
        """Other prompts go through until nothing of before is in the pool."""
        before = {digest for digest in self.pool.block_hash if digest}
        for number in range(100, 140):
            self.compute(f"flood-{number}", [number] * 4 * BLOCK_SIZE)
            if not before & set(self.pool.block_hash):
                return
        raise AssertionError("something is never evicted")


PROMPT = list(range(21))  # five full blocks and a token


def test_half_of_the_pool_is_kept_free_or_copied() -> None:
    scene = TierScene(16)
    scene.run(scene.front, scene.run_on, submission("a", list(range(100, 100 + 4 * 7))))
    assert scene.down == []
    scene.run(scene.front, scene.run_on, submission("b", list(range(200, 200 + 4 * 4))))
    assert len(scene.down) == 3
    assert {scene.pool.state[copy.block] for copy in scene.down} == {SEALED}
    tail = scene.down[0]
    assert (
        tail.content.tokens
        == scene.pool.tokens[tail.block]
        == bytes((124, 0, 0, 0, 125, 0, 0, 0)) + bytes((126, 0, 0, 0, 127, 0, 0, 0))
    )
    scene.settle()
    assert list(scene.pool.backed) == [tail.block, *list(scene.pool.backed)[1:]]
    assert (len(scene.pool.backed), len(scene.tier), scene.tier.demotions) == (3, 3, 3)


def test_copied_blocks_are_still_hits_and_are_evicted_first() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.compute("b", [n + 50 for n in PROMPT])
    assert 0 < len(scene.pool.backed) <= 5
    assert scene.run(scene.front, scene.run_on, submission("a2", PROMPT)).num_cached_tokens == 20
    assert scene.up == []
    scene.settle()
    first = scene.pool.backed.first
    assert len(scene.pool.cached)
    scene.submit(scene.front, scene.run_on, submission("c", [n + 100 for n in PROMPT] * 2))
    assert scene.pool.state[first] == RESERVED


def test_when_blocks_are_scarce_nothing_is_copied_and_nothing_waits() -> None:
    scene = TierScene(16)
    scene.submit(scene.front, scene.run_on, submission("long", list(range(500, 556))))
    scene.run(scene.front, scene.run_on, submission("small", [1, 2, 3, 4, 5]))
    assert scene.down == []
    assert scene.run(scene.front, scene.run_on, submission("next", [11, 12, 13, 14, 15])).block_table
    assert scene.pool.evictions


def test_copies_down_are_bounded_at_a_time() -> None:
    scene = TierScene(100)
    scene.run(scene.front, scene.run_on, submission("a", [n % 90 for n in range(84)]))
    scene.run(scene.front, scene.run_on, submission("b", [n % 90 + 1 for n in range(84)]))
    scene.run(scene.front, scene.run_on, submission("c", [n % 90 + 2 for n in range(84)]))
    assert len(scene.down) == MAX_DEMOTIONS


def test_a_block_that_is_used_while_it_is_copied_stays_in_use() -> None:
    scene = TierScene(16)
    scene.run(scene.front, scene.run_on, submission("a", PROMPT))
    scene.run(scene.front, scene.run_on, submission("b", [n + 50 for n in PROMPT]))
    copies = list(scene.down)
    assert copies
    _, sequence = scene.submit(scene.front, scene.run_on, submission("a2", PROMPT))
    assert sequence.num_cached_tokens == 20
    for copy in copies:
        scene.end_copy(copy)
        assert scene.pool.state[copy.block] == SEALED
        assert copy.block not in scene.pool.backed


def test_a_copy_that_failed_costs_nothing_but_the_copy() -> None:
    scene = TierScene(16)
    scene.run(scene.front, scene.run_on, submission("a", PROMPT))
    scene.run(scene.front, scene.run_on, submission("b", [n + 50 for n in PROMPT]))
    copies = list(scene.down)
    for copy in copies:
        scene.end_copy(copy, good=False)
        assert scene.pool.state[copy.block] == CACHED
    assert scene.down == []  # a pause
    assert scene.tier.failures == len(copies) > 0
    assert scene.run(scene.front, scene.run_on, submission("a2", PROMPT)).num_cached_tokens == 20


def test_a_prompt_that_was_evicted_comes_back() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("again", PROMPT)
    assert scene.starts() == []
    copies = list(scene.up)
    assert [copy.content.tokens[0] for copy in copies] == [0, 4, 8, 12, 16]
    assert {scene.pool.state[copy.block] for copy in copies} == {RESERVED}
    assert len({copy.block for copy in copies}) == 5
    for copy in copies:
        assert scene.starts() == []
        scene.end_copy(copy)
    (start,) = scene.starts()
    assert start.sequences[0].num_cached_tokens == 20
    assert [block for block, _ in start.sequences[0].block_table[:5]] == [copy.block for copy in copies]
    assert scene.tier.promotions == 5


def test_what_could_not_be_read_is_a_miss() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("again", PROMPT)
    copies = list(scene.up)
    scene.end_copy(copies[2], good=False)
    assert scene.pool.state[copies[2].block] == FREE
    for copy in (copies[0], copies[1], copies[3], copies[4]):
        scene.end_copy(copy)
    (start,) = scene.starts()
    assert start.sequences[0].num_cached_tokens == 8
    assert not scene.tier.find(copies[2].content)


def test_the_wait_is_bounded_and_what_comes_late_is_kept() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("again", PROMPT)
    copies = list(scene.up)
    scene.now += MAX_WAIT * 0.9
    scene.take(scene.core.tick(scene.now))
    assert scene.starts() == []
    scene.now += MAX_WAIT * 0.2
    scene.take(scene.core.tick(scene.now))
    (start,) = scene.starts()
    assert start.sequences[0].num_cached_tokens == 0
    for copy in copies:
        scene.end_copy(copy)
    assert {scene.pool.state[copy.block] for copy in copies} == {CACHED}
    scene.end(scene.run_on, start, 21)
    assert scene.run(scene.front, scene.run_on, submission("third", PROMPT)).num_cached_tokens == 20


def test_a_disk_that_hangs_gets_no_more_blocks() -> None:
    scene = TierScene(40, resume="promote")
    scene.compute("a", PROMPT)
    scene.compute("b", [n + 50 for n in PROMPT])
    scene.evict_all()
    scene.ask("a2", PROMPT)
    hanging = list(scene.up)
    scene.now += MAX_WAIT
    scene.take(scene.core.tick(scene.now))
    assert len(scene.starts()) == 1
    scene.ask("b2", [n + 50 for n in PROMPT])
    assert scene.up == hanging
    assert len(scene.starts()) == 1


def test_a_request_that_goes_away_leaves_its_copies_to_the_cache() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("again", PROMPT)
    scene.send(scene.front, Cancel("again", 0))
    scene.settle()
    assert scene.starts() == []
    assert scene.run(scene.front, scene.run_on, submission("third", PROMPT)).num_cached_tokens == 20


def test_two_requests_for_the_same_blocks_copy_them_once() -> None:
    scene = TierScene(20)
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("one", PROMPT)
    scene.send(scene.front, Cancel("one", 0))
    scene.ask("two", PROMPT)
    assert len(scene.up) == 5
    assert scene.starts() == []
    scene.settle()
    (start,) = scene.starts()
    assert start.sequences[0].num_cached_tokens == 20
    assert scene.tier.promotions == 5


def test_hits_of_a_request_are_not_evicted_for_its_own_copies() -> None:
    scene = TierScene(16, resume="promote")
    scene.compute("a", PROMPT)
    scene.evict_all()
    scene.ask("head", PROMPT[:9])
    scene.settle()
    (start,) = scene.starts()
    scene.end(scene.run_on, start, 9)
    scene.settle()
    for number in range(6):
        scene.compute(f"o{number}", [number + 200] * 4)
    scene.ask("again", PROMPT)
    assert len(scene.up) == 3
    scene.settle()
    (start,) = scene.starts()
    assert start.sequences[0].num_cached_tokens == 20


def test_another_salt_or_no_wish_to_read_finds_nothing() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    for fields in ({"salt": "other"}, {"read_cache": False}):
        scene.ask(f"{fields}", PROMPT, **fields)
        (start,) = scene.starts()
        assert start.sequences[0].num_cached_tokens == 0
        scene.end(scene.run_on, start, 21)
        scene.settle()


def test_what_an_earlier_start_has_left_is_found() -> None:
    scene = TierScene(16)
    scene.compute("a", PROMPT)
    scene.evict_all()
    kept = scene.tier.contents()
    again = TierScene(16)
    again.core = Core("boot-2", "/pool", Policy(watermark=0.0, growth_room=0.0), 0.0)
    again.tier = Tier(64, kept)
    again.core.attach(BlockPool(16, LAYOUT), tier=again.tier)
    again.front, again.run_on = again.frontend(), again.runner()
    again.ask("again", PROMPT)
    again.settle()
    (start,) = again.starts()
    assert start.sequences[0].num_cached_tokens == 20


def slow_disk(scene: TierScene) -> None:
    """Both rates are known, and computing is by far the cheaper way."""
    scene.tier.copying.add(1, 10.0, scene.now)
    scene.tier.computing.add(1000, 1.0, scene.now)


@pytest.mark.parametrize(("resume", "comes_back"), [("auto", False), ("promote", True), ("recompute", False)])
def test_what_is_cheaper_decides_unless_it_is_set(resume: str, comes_back: bool) -> None:
    scene = TierScene(16, resume=resume)
    scene.compute("a", PROMPT)
    scene.evict_all()
    slow_disk(scene)
    scene.ask("again", PROMPT)
    assert bool(scene.up) == comes_back
    assert bool(scene.starts()) != comes_back


@pytest.mark.parametrize(("resume", "comes_back"), [("auto", True), ("promote", True), ("recompute", False)])
def test_a_preempted_request_comes_back_from_the_tier_or_is_computed_again(
    resume: str, comes_back: bool
) -> None:
    scene = TierScene(32, resume=resume)
    prompts = list(range(300, 380)), list(range(45))
    first, _ = scene.submit(scene.front, scene.run_on, submission("1", prompts[0], max_tokens=20))
    second, _ = scene.submit(
        scene.front, scene.run_on, submission("2", prompts[1], max_tokens=20, arrival=1.0)
    )
    scene.send(scene.run_on, StepReport(credits_wanted=2))
    assert scene.received(scene.run_on)[-1].preempts == (second.start_id,)
    scene.end(scene.run_on, second, 45, "preempted", (7,))
    scene.settle()
    assert scene.tier.demotions >= 8
    scene.send(scene.run_on, StepReport(credits_wanted=10))
    assert scene.starts() == []
    scene.end(scene.run_on, first, 80)
    assert bool(scene.up) == comes_back
    scene.settle()
    (start,) = scene.starts()
    assert start.sequences[0].output_token_ids == (7,)
    assert (start.sequences[0].num_cached_tokens >= 40) == comes_back


def test_nobody_is_preempted_for_blocks_whose_copy_ends_in_a_moment() -> None:
    scene = TierScene(16)
    for number in (1, 2):
        scene.submit(scene.front, scene.run_on, submission(f"c{number}", [number + 40] * 20, max_tokens=20))
    scene.run(scene.front, scene.run_on, submission("a", PROMPT))
    assert scene.down
    scene.send(scene.run_on, StepReport(credits_wanted=scene.pool.available))
    refs = tuple(ref for message in scene.received(scene.run_on) for ref in message.credits)
    scene.send(scene.run_on, StepReport(taken=(Taken(1, 0, refs),), credits_wanted=4))
    assert (scene.pool.available, scene.core.state.counters.preemptions) == (0, 0)
    scene.now += 5.0
    scene.send(scene.run_on, StepReport(credits_wanted=4))
    assert scene.core.state.counters.preemptions == 1


def test_the_speed_of_computing_is_taken_from_first_reports_on_prompts() -> None:
    scene = TierScene(32)
    start, _ = scene.submit(scene.front, scene.run_on, submission("a", PROMPT, max_tokens=20))
    scene.now = 2.0
    scene.send(scene.run_on, StepReport(progress=(Progress(start.start_id, 0, (), 20),)))
    assert scene.tier.computing.time_of(10, scene.now) == pytest.approx(1.0)
    scene.now = 100.0
    scene.send(scene.run_on, StepReport(progress=(Progress(start.start_id, 0, (1, 2, 3, 4), 24),)))
    assert scene.tier.computing.time_of(10, 2.0) == pytest.approx(1.0)
