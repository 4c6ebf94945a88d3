"""After the death of the manager: what runs is taken over, if it is claimed and the records bear it out."""

import pytest
from msgspec.structs import replace

from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, RESERVED, SEALED, BlockPool
from kvmanager.pool.invariants import audit
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Choice,
    Claimed,
    Directives,
    Ended,
    FrontendHello,
    HeldSequence,
    HeldStart,
    Holdings,
    Layout,
    NotHeld,
    Progress,
    Ready,
    RunnerHello,
    SamplingParams,
    Session,
    StepReport,
    Submit,
    Welcome,
)
from kvmanager.restore import restore_pool
from kvmanager.state import Effects, Policy

LAYOUT = Layout("fingerprint", "float32", 4, 1, 1, 2)
FRONTEND_HELLO = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "tokens")
RUNNER_HELLO = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, 4, 100)
SUBMIT = Submit("request", 0, 0.0, (1, 2, 3, 4, 5), (Choice(0), Choice(1)), SamplingParams(9, 1))
SURVIVORS = ("frontend", "runner")


class Restarted:
    """A manager that starts while a runner has computed 9 of 10 tokens of a request, 8 of them as far as the
    last manager knew, which had sealed blocks 0 and 1; choice 1 is still to be forked off. Block 3 is a
    credit, block 4 was freed lately.
    """

    def __init__(self) -> None:
        self.core = Core("first", "/pool", Policy(), 0.0)
        self.pool = BlockPool(8, LAYOUT)
        self.core.attach(self.pool)
        self.hello(0.0, FRONTEND_HELLO)
        self.runner = self.hello(0.0, RUNNER_HELLO)
        self.core.handle(0.0, self.runner, Ready())
        given = tuple(Choice(index, (6, 7, 8, 9)) for index in range(2))
        effects = self.core.handle(0.0, 1, replace(SUBMIT, choices=given))
        (directives,) = [each for _, each in effects.messages if isinstance(each, Directives)]
        (self.start,) = directives.starts
        assert self.start.sequences[0].block_table == ((0, 1), (1, 1), (2, 1))
        progress = Progress(self.start.start_id, 0, (), 8)
        (_, credit), *_ = self.core.handle(
            0.0, self.runner, StepReport((progress,), credits_wanted=1)
        ).messages
        sequence = HeldSequence(0, (6, 7, 8, 9, 10), (0, 1, 2), 9, (1,))
        started = HeldStart(self.start.start_id, "request", 0, "tokens", (sequence,))
        self.holdings = Holdings((started,), credit.credits)
        self.claim = replace(SUBMIT, choices=given, claim=True)
        self.restart()

    def restart(self) -> None:
        records = [self.pool.record(block) for block in range(8)]
        self.core = Core("second", "/pool", Policy(), 10.0)
        self.pool, quarantines = restore_pool(LAYOUT, records, SURVIVORS)
        self.core.attach(self.pool, quarantines, SURVIVORS)
        assert self.pool.state[:5] == [CACHED, CACHED, QUARANTINED, QUARANTINED, FREE]

    def hello(self, now: float, hello: FrontendHello | RunnerHello) -> int:
        answer, self.effects = self.core.hello(now, hello)
        session = answer.session if isinstance(answer, Welcome) else answer
        assert isinstance(session, Session)
        return session.client_id

    def take_over(self, holdings: Holdings | None = None, now: float = 10.0) -> Effects:
        """What comes of it once both have spoken."""
        self.runner = self.hello(now, replace(RUNNER_HELLO, holdings=holdings or self.holdings))
        assert self.effects.messages == []
        self.frontend = self.hello(now, FRONTEND_HELLO)
        assert self.core.handle(now, self.frontend, self.claim).messages == []
        return self.core.handle(now, self.frontend, Claimed())

    def kept(self, effects: Effects) -> tuple[int, ...]:
        (welcome,) = [each for _, each in effects.messages if isinstance(each, Welcome)]
        return welcome.kept


def test_what_is_held_and_claimed_goes_on() -> None:
    world = Restarted()
    effects = world.take_over()
    assert (world.frontend, Accepted("request", 0)) in effects.messages
    start_id = world.start.start_id
    assert world.kept(effects) == (start_id,)
    assert world.pool.state[:5] == [SEALED, SEALED, RESERVED, RESERVED, FREE]
    assert audit(world.core.state) == []
    world.core.handle(10.0, world.runner, Ready())
    assert world.core.state.survivors == set()
    ends = (Ended(start_id, 0, (11,), 10, "finished"),)
    world.core.handle(10.1, world.runner, StepReport(ended=ends, returned=world.holdings.credits))
    assert world.core.state.actives() == []
    assert world.pool.counts == [5, 0, 0, 3, 0]
    assert audit(world.core.state) == []


def test_a_full_block_whose_report_was_lost_is_sealed() -> None:
    world = Restarted()
    started = world.holdings.starts[0]
    longer = HeldSequence(0, (6, 7, 8, 9, 10, 11, 12), (0, 1, 2), 12)
    both = (longer, replace(longer, choice=1))
    holdings = replace(world.holdings, starts=(replace(started, sequences=both),))
    assert world.kept(world.take_over(holdings)) == (started.start_id,)
    assert world.pool.state[:3] == [SEALED] * 3
    assert [world.pool.ledger.ref_count(block) for block in range(3)] == [2, 2, 2]
    assert audit(world.core.state) == []


def test_choices_that_do_not_run_yet_come_afterwards() -> None:
    world = Restarted()
    started = world.holdings.starts[0]
    alone = (replace(started.sequences[0], forks=()),)
    holdings = replace(world.holdings, starts=(replace(started, sequences=alone),))
    world.take_over(holdings)
    (active,) = world.core.state.actives()
    assert [group.choices for group in active.request.later] == [(1,)]
    assert audit(world.core.state) == []


def test_the_second_hello_gets_the_same_answer_while_nobody_has_spoken_and_after() -> None:
    world = Restarted()
    hello = replace(RUNNER_HELLO, holdings=world.holdings)
    session, _ = world.core.hello(10.0, hello)
    assert isinstance(session, Session)
    assert world.core.hello(10.1, hello)[0] == session
    world.take_over()
    welcome = world.core.hello(10.2, hello)[0]
    assert isinstance(welcome, Welcome)
    assert (welcome.session, welcome.kept) == (session, (world.start.start_id,))


@pytest.mark.parametrize(
    "changed",
    [
        {"block_table": (0, 1, 4)},  # nobody's
        {"block_table": (0, 1, 3)},  # a credit
        {"block_table": (0, 1, 99)},
        {"block_table": (0, 1, -6)},
        {"block_table": (0, 2, 1)},
        {"block_table": (0, 0, 2)},
        {"block_table": (0, 1)},
        {"block_table": (0, 1, 2, 3)},
        {"num_computed_tokens": 11},
        {"num_computed_tokens": -1},
        {"num_computed_tokens": 7},
        {"output_token_ids": (6, 7, 9, 9, 10)},  # not what block 1 holds
        {"output_token_ids": (6, 7, 8, 9, 1 << 40)},
        {"output_token_ids": (6, 7, 8, 9, *range(20))},
        {"choice": 128},
        {"forks": (0,)},
    ],
)
def test_what_the_records_do_not_bear_out_is_submitted_again(changed: dict[str, object]) -> None:
    world = Restarted()
    started = world.holdings.starts[0]
    wrong = replace(started, sequences=(replace(started.sequences[0], **changed),))
    effects = world.take_over(replace(world.holdings, starts=(wrong,)))
    assert world.kept(effects) == ()
    assert (world.frontend, NotHeld((("request", 0),))) in effects.messages
    assert world.pool.state[:5] == [CACHED, CACHED, QUARANTINED, QUARANTINED, FREE]
    assert audit(world.core.state) == []
    world.core.handle(10.0, world.runner, Ready())  # it has dropped everything
    assert world.pool.counts == [6, 0, 0, 2, 0]


@pytest.mark.parametrize(
    "second",
    [
        {"block_table": (0, 2, 1)},
        {"block_table": (2, 1, 0)},
        {"output_token_ids": (6, 7, 8, 9, 10, 11, 13), "num_computed_tokens": 12},  # other tokens in block 2
        {"output_token_ids": (6, 7, 8, 9, 10, 11, 12), "num_computed_tokens": 11},  # one has not filled it
    ],
)
def test_sequences_that_share_a_block_must_agree_on_it(second: dict[str, object]) -> None:
    world = Restarted()
    started = world.holdings.starts[0]
    first = HeldSequence(0, (6, 7, 8, 9, 10, 11, 12), (0, 1, 2), 12)
    other = replace(first, choice=1, **second)
    holdings = replace(world.holdings, starts=(replace(started, sequences=(first, other)),))
    assert (world.kept(world.take_over(holdings)), audit(world.core.state)) == ((), [])


@pytest.mark.parametrize("start_id", [-1, 2**63, 2**64 - 1])
def test_a_start_has_a_number_that_others_can_follow(start_id: int) -> None:
    world = Restarted()
    started = replace(world.holdings.starts[0], start_id=start_id)
    assert world.kept(world.take_over(replace(world.holdings, starts=(started,)))) == ()


def test_a_claim_gives_way_to_the_next_attempt() -> None:
    world = Restarted()
    runner = world.hello(10.0, replace(RUNNER_HELLO, holdings=world.holdings))
    frontend = world.hello(10.0, FRONTEND_HELLO)
    world.core.handle(10.0, frontend, world.claim)
    world.core.handle(10.0, frontend, replace(world.claim, claim=False, attempt=1))
    effects = world.core.handle(10.0, frontend, Claimed())
    assert [who for who, _ in effects.messages] == [runner]
    assert (world.kept(effects), audit(world.core.state)) == ((), [])
    assert len(world.core.state.waiting) == 1


def test_a_cancel_is_told_again_with_a_welcome_that_may_have_been_lost() -> None:
    world = Restarted()
    world.take_over()
    world.core.handle(10.0, world.frontend, Cancel("request", 0))
    welcome, effects = world.core.hello(10.1, replace(RUNNER_HELLO, holdings=world.holdings))
    assert isinstance(welcome, Welcome)
    (cancels,) = [each.cancels for who, each in effects.messages if who == world.runner]
    assert cancels == (world.start.start_id,)


def test_the_time_of_a_roll_call_begins_when_the_records_have_been_read() -> None:
    world = Restarted()
    assert world.core.tick(20.0).messages == []
    assert world.kept(world.take_over(now=21.0)) == (world.start.start_id,)


@pytest.mark.parametrize("credits", [((3, 7),), ((4, 1),), ((2, 1), (3, 1)), ((99, 1),)])
def test_a_runner_with_wrong_credits_keeps_nothing(credits: tuple[tuple[int, int], ...]) -> None:
    world = Restarted()
    assert world.kept(world.take_over(replace(world.holdings, credits=credits))) == ()
    assert audit(world.core.state) == []


@pytest.mark.parametrize("changed", [{"attempt": 1}, {"token_endpoint": "other"}, {"request_id": "other"}])
def test_only_that_very_attempt_is_taken_over(changed: dict[str, object]) -> None:
    world = Restarted()
    other = replace(world.holdings.starts[0], **changed)
    effects = world.take_over(replace(world.holdings, starts=(other,)))
    assert (world.kept(effects), audit(world.core.state)) == ((), [])


def test_after_a_time_nobody_is_waited_for() -> None:
    world = Restarted()
    frontend = world.hello(10.0, FRONTEND_HELLO)
    world.core.handle(10.0, frontend, world.claim)
    wait = world.core.state.policy.roll_call_wait
    assert world.core.tick(9.9 + wait).messages == []
    assert world.core.tick(10.0 + wait).messages == [(frontend, NotHeld((("request", 0),)))]
    late = world.core.hello(12.0, replace(RUNNER_HELLO, holdings=world.holdings))[0]
    assert isinstance(late, Welcome)
    assert late.kept == ()
    assert world.core.handle(12.0, frontend, world.claim).messages == [(frontend, NotHeld((("request", 0),)))]


def test_one_that_died_is_not_waited_for() -> None:
    world = Restarted()
    frontend = world.hello(10.0, FRONTEND_HELLO)
    world.core.handle(10.0, frontend, world.claim)
    world.core.handle(10.0, frontend, Claimed())
    effects = world.core.process_died(10.0, "runner")
    assert (frontend, NotHeld((("request", 0),))) in effects.messages
    assert world.pool.counts == [6, 0, 0, 2, 0]


def test_a_claim_that_is_cancelled_or_whose_frontend_dies_is_dropped() -> None:
    for what in ("cancel", "death"):
        world = Restarted()
        runner = world.hello(10.0, replace(RUNNER_HELLO, holdings=world.holdings))
        frontend = world.hello(10.0, FRONTEND_HELLO)
        world.core.handle(10.0, frontend, world.claim)
        if what == "cancel":
            world.core.handle(10.0, frontend, Cancel("request", 0))
            effects = world.core.handle(10.0, frontend, Claimed())
        else:
            effects = world.core.process_died(10.0, "frontend")
        assert [who for who, _ in effects.messages] == [runner]
        assert (world.kept(effects), audit(world.core.state)) == ((), [])


def test_a_runner_that_dies_after_its_start_was_taken_over_loses_it_as_ever() -> None:
    world = Restarted()
    world.take_over()
    effects = world.core.process_died(10.5, "runner")
    assert [type(each).__name__ for who, each in effects.messages if who == world.frontend] == ["RunnerLost"]
    assert world.pool.counts == [6, 0, 0, 2, 0]
    assert audit(world.core.state) == []
