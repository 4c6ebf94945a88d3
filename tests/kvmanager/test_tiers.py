"""What the tier keeps and gives up, by example and against a naive model; rates and what they decide."""

from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmanager.pool.hashing import Content
from kvmanager.tier.tiers import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_DEMOTIONS,
    RATE_LIFE,
    Copy,
    Rate,
    Tier,
)


def content(number: int) -> Content:
    return Content(sha256(b"%d" % number).digest(), bytes(32), b"", number.to_bytes(16, "little"))


def digest(number: int) -> bytes:
    return content(number).block_hash


def fill(tier: Tier, *numbers: int) -> None:
    for number in numbers:
        copy = tier.demote(number, content(number), 0.0)
        assert copy is not None
        tier.demoted(copy, True, 0.0)


def held(tier: Tier) -> list[bytes]:
    return [found.block_hash for _, found in tier.contents()]


def test_content_is_found_when_its_copy_is_done_and_not_before() -> None:
    tier = Tier(2)
    copy = tier.demote(7, content(1), 0.0)
    assert copy == Copy(7, 0, content(1))
    assert digest(1) in tier
    assert not tier.find(content(1))
    tier.demoted(copy, True, 0.0)
    assert tier.find(content(1))


def test_equal_hashes_with_other_tokens_or_another_parent_are_a_miss() -> None:
    tier = Tier(2)
    fill(tier, 1)
    assert not tier.find(content(1)._replace(tokens=content(2).tokens))
    assert not tier.find(content(1)._replace(parent_hash=digest(2)))


def test_a_full_tier_gives_up_what_was_used_longest_ago() -> None:
    tier = Tier(3)
    fill(tier, 1, 2, 3)
    tier.promoted(tier.promote(digest(1), 0), True, 0.1, 0.0)
    fill(tier, 4)
    assert held(tier) == [digest(3), digest(1), digest(4)]


def test_content_that_is_being_read_is_not_given_up() -> None:
    tier = Tier(1)
    fill(tier, 1)
    copy = tier.promote(digest(1), 0)
    assert tier.demote(1, content(2), 0.0) is None
    tier.promoted(copy, True, 0.1, 0.0)
    assert tier.demote(1, content(2), 0.0) is not None


def test_content_that_cannot_be_read_is_forgotten_and_its_slot_used_again() -> None:
    tier = Tier(1)
    fill(tier, 1)
    tier.promoted(tier.promote(digest(1), 0), False, 0.1, 0.0)
    assert (held(tier), tier.failures, tier.promotions) == ([], 1, 0)
    fill(tier, 2)
    assert held(tier) == [digest(2)]


def test_demotions_at_a_time_are_bounded() -> None:
    tier = Tier(100)
    copies = [tier.demote(number, content(number), 0.0) for number in range(MAX_DEMOTIONS + 1)]
    assert None not in copies[:-1]
    assert copies[-1] is None


def test_failed_demotions_make_pauses_that_grow_until_one_goes_well() -> None:
    tier, now = Tier(4), 0.0
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0):
        copy = tier.demote(0, content(0), now)
        assert copy is not None
        tier.demoted(copy, False, now)
        assert FIRST_PAUSE <= pause <= LONGEST_PAUSE
        assert tier.demote(0, content(0), now + pause * 0.99) is None
        now += pause
    assert tier.failures == 8
    assert tier.demote(0, content(0), now) is not None


def test_a_demotion_that_goes_well_makes_the_next_pause_short_again() -> None:
    tier = Tier(4)
    for number, good, now in ((0, False, 0.0), (0, False, 10.0), (0, True, 20.0), (1, False, 20.0)):
        copy = tier.demote(0, content(number), now)
        assert copy is not None
        tier.demoted(copy, good, now)
    assert tier.demote(0, content(1), 20.0 + FIRST_PAUSE) is not None


def test_what_an_earlier_start_has_left_is_found_and_given_up_in_its_order() -> None:
    tier = Tier(3, [(2, content(1)), (0, content(2))])
    fill(tier, 3)
    assert tier.contents() == [(2, content(1)), (0, content(2)), (1, content(3))]
    fill(tier, 4)
    assert tier.contents()[-1] == (2, content(4))


def test_a_rate_weighs_samples_by_their_amount_and_forgets() -> None:
    rate = Rate()
    assert rate.time_of(10, 0.0) is None
    rate.add(100, 1.0, 0.0)
    rate.add(1, 5.0, 0.0)
    assert abs(rate.time_of(91, 0.0) - 5.9) < 1e-9  # type: ignore[operator]
    assert rate.time_of(91, RATE_LIFE + 1) is None
    for _ in range(200):
        rate.add(1, 1.0, 0.0)
    assert abs(rate.time_of(1, 0.0) - 1.0) < 1e-6  # type: ignore[operator]


def test_the_cheaper_way_is_taken_once_both_rates_are_known() -> None:
    tier = Tier(8)
    fill(tier, 0, 1, 2)
    assert tier.copy_is_cheaper(1, 16, 0.0)
    tier.computing.add(1000, 1.0, 0.0)  # 16 ms a block of 16 tokens
    assert tier.copy_is_cheaper(1, 16, 0.0)
    tier.promoted(tier.promote(digest(0), 0), True, 0.010, 0.0)
    assert tier.copy_is_cheaper(1, 16, 0.0)
    tier.promote(digest(1), 1)
    assert not tier.copy_is_cheaper(1, 16, 0.0)  # behind another one
    assert tier.copy_is_cheaper(1, 32, 0.0)
    tier.copying.add(1, 1.0, 0.0)
    assert not tier.copy_is_cheaper(1, 32, 0.0)
    assert tier.copy_is_cheaper(1, 32, RATE_LIFE + 1)  # a slow moment does not count for ever


class TierMachine(RuleBasedStateMachine):
    """Against a list in order of use, the slots as a plain dictionary of what was last written there."""

    @initialize(num_slots=st.integers(1, 6))
    def begin(self, num_slots: int) -> None:
        self.tier = Tier(num_slots)
        self.order: list[int] = []
        self.disk: dict[int, int] = {}  # slot → what its bytes are
        self.slot_of: dict[int, int] = {}
        self.writing: dict[int, Copy] = {}
        self.reading: dict[int, Copy] = {}
        self.counts = [0, 0, 0]
        self.now = 0.0

    @rule(number=st.integers(0, 9), block=st.integers(0, 3))
    def demote(self, number: int, block: int) -> None:
        if number in self.order or number in self.writing:
            assert digest(number) in self.tier
            return
        self.now += 1000.0
        copy = self.tier.demote(block, content(number), self.now)
        used = len(self.order) + len(self.writing)
        victims = [old for old in self.order if old not in self.reading]
        if len(self.writing) == MAX_DEMOTIONS or (used == self.tier.num_slots and not victims):
            assert copy is None
            return
        assert copy is not None
        if used == self.tier.num_slots:
            self.order.remove(victims[0])
            assert copy.slot == self.slot_of.pop(victims[0])
        busy = {other.slot for other in (*self.writing.values(), *self.reading.values())}
        assert copy.slot not in busy
        assert copy.slot not in self.slot_of.values()
        self.writing[number] = copy
        self.disk[copy.slot] = -1

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def demoted(self, data: st.DataObject, good: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        copy = self.writing.pop(number)
        self.tier.demoted(copy, good, self.now)
        self.counts[0 if good else 2] += 1
        if good:
            self.order.append(number)
            self.slot_of[number] = copy.slot
            self.disk[copy.slot] = number

    @precondition(lambda self: set(self.order) - set(self.reading))
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.order) - set(self.reading))))
        self.reading[number] = self.tier.promote(digest(number), 5)
        self.order.remove(number)
        self.order.append(number)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), good=st.booleans())
    def promoted(self, data: st.DataObject, good: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.reading)))
        copy = self.reading.pop(number)
        assert self.disk[copy.slot] == number
        self.tier.promoted(copy, good, 0.1, self.now)
        self.counts[1 if good else 2] += 1
        if not good:
            self.order.remove(number)
            del self.slot_of[number]

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "tier"):
            return
        tier = self.tier
        assert tier.contents() == [(self.slot_of[number], content(number)) for number in self.order]
        assert len(tier) == len(self.order)
        assert all(self.disk[self.slot_of[number]] == number for number in self.order)
        assert [tier.demotions, tier.promotions, tier.failures] == self.counts
        assert set(tier.demoting) == {digest(number) for number in self.writing}
        assert set(tier.promoting) == {digest(number) for number in self.reading}
        for number in range(10):
            known = number in self.order
            assert tier.find(content(number)) == known
            assert (digest(number) in tier) == (known or number in self.writing)


TierMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTierMachine = TierMachine.TestCase
