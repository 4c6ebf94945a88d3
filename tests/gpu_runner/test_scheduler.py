"""The scheduler by example: one rule of the runner in each test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.credits import look_ahead
from gpu_runner.scheduler import Limits, Scheduler
from gpu_runner.step import StepPlan
from kvmanager.protocol import Directives, SamplingParams, SequenceStart, Start, StepReport, TokenEvent
from tests.gpu_runner.fake_engine import FakeEngine, expected_output
from tests.gpu_runner.fake_manager import FakeManager, Job

ALL = 1 << 30


class World:
    """A scheduler with its engine and manager; `step` is one turn of the runner's loop."""

    def __init__(self, num_blocks: int = 200, **limits: int) -> None:
        given = {
            "block_size": 4,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
            "max_model_len": 100,
        } | limits
        self.limits = Limits(**given)
        self.engine = FakeEngine(self.limits.block_size, self.limits.max_model_len)
        self.manager = FakeManager(num_blocks, self.limits.block_size, self.engine.blocks)
        self.engine.may_write = self.manager.may_write
        self.scheduler = Scheduler(self.limits, self.engine.eos_token_ids)
        self.events: list[TokenEvent] = []
        self.reports: list[StepReport] = []
        self.num_jobs = 0

    def start(self, prompt: tuple[int, ...], num_choices: int = 1, **sampling: object) -> int:
        """Returns the start id."""
        given = {"max_tokens": 8, "seed": 0, "ignore_eos": True} | sampling
        job = Job(self.num_jobs, prompt, SamplingParams(**given), num_choices)
        self.num_jobs += 1
        start = self.manager.start(job, use_cache=True)
        assert start is not None
        self.scheduler.handle(Directives(starts=(start,)))
        return start.start_id

    def step(self, num_credits: int = ALL) -> StepPlan | None:
        self.scheduler.handle(self.manager.directives(num_credits))
        plan = self.scheduler.schedule()
        if (report := self.scheduler.report()) is not None:
            self.reports.append(report)
            self.manager.apply(report)
        if plan is not None:
            for events in self.scheduler.update(plan, self.engine.execute(plan)).values():
                self.events.extend(events)
        return plan

    def run(self, num_credits: int = ALL) -> int:
        """Steps until nothing can run; returns how many computed something."""
        steps = 0
        while self.step(num_credits) is not None:
            steps += 1
        return steps

    def output(self, job: int, choice: int = 0) -> list[int]:
        return [
            token
            for event in self.events
            if (event.request_id, event.choice) == (f"job-{job}", choice)
            for token in event.token_ids
        ]


def planned(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(start id, number of tokens) of each sequence in the plan."""
    assert plan is not None
    return [(item.sequence.start_id, item.length) for item in plan.scheduled]


def test_tokens_are_those_of_the_model() -> None:
    world = World()
    world.start((5, 6, 7), max_tokens=20)
    world.run()
    sampling = SamplingParams(max_tokens=20, seed=0, ignore_eos=True)
    assert world.output(0) == expected_output((5, 6, 7), 0, sampling, 100)[0]
    assert world.events[-1].finish_reason == "length"


def test_a_long_prompt_is_computed_in_chunks_while_others_decode_at_every_step() -> None:
    world = World(max_num_batched_tokens=10, max_num_seqs=8)
    first = world.start((2, 3), max_tokens=50)
    assert planned(world.step()) == [(first, 2)]
    second = world.start(tuple(range(30)), max_tokens=5)
    for _ in range(3):
        assert planned(world.step()) == [(first, 1), (second, 9)]
    assert planned(world.step()) == [(first, 1), (second, 3)]
    assert planned(world.step()) == [(first, 1), (second, 1)]


def test_more_sequences_than_fit_in_a_step_take_turns() -> None:
    world = World(max_num_seqs=2)
    starts = [world.start((2, 3 + index), max_tokens=8) for index in range(3)]
    world.run()
    assert world.manager.jobs == {}
    assert [len(world.output(job)) for job in range(len(starts))] == [8, 8, 8]


def test_nothing_is_reported_in_a_step_in_which_no_block_fills() -> None:
    world = World()
    world.start((2, 3, 4, 5, 6), max_tokens=40)
    world.step()
    world.step()  # tells that the prompt filled a block
    told = []
    while world.manager.jobs:
        before, num_computed_tokens = len(world.reports), 4 + len(world.events)
        world.step()
        if len(world.reports) > before:
            told.append(num_computed_tokens)
    assert told == [*range(8, 44, 4), 44]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_choices=st.integers(1, 3),
    max_tokens=st.integers(1, 30),
)
def test_with_its_credits_granted_no_sequence_ever_sits_out(
    lengths: list[int], num_choices: int, max_tokens: int
) -> None:
    world = World(num_blocks=1000)
    for index, length in enumerate(lengths):
        world.start((index + 2,) * length, num_choices, max_tokens=max_tokens)
        world.step()
    world.run()
    assert world.scheduler.statistics().sat_out == 0
    assert world.manager.credits_held == set()
    assert len(world.manager.free) == 1000


def test_a_sequence_without_a_credit_sits_out_and_the_others_go_on() -> None:
    world = World()
    short = world.start((2, 3, 4, 5), max_tokens=8)
    long = world.start((2,), max_tokens=3)
    world.step()
    assert planned(world.step(num_credits=0)) == [(long, 1)]
    assert planned(world.step(num_credits=0)) == [(long, 1)]
    assert world.step(num_credits=0) is None
    assert planned(world.step()) == [(short, 1)]


def test_credits_are_wanted_for_the_next_step_at_which_blocks_fill() -> None:
    world = World()
    for prompt in ((2, 3, 4, 5), (2, 3, 4), (2,), (3,)):
        world.start(prompt, max_tokens=30)
    world.step(num_credits=0)  # 0, 1, 3 and 3 steps until each needs a block
    assert world.reports[-1].credits_wanted == 1
    world.step(num_credits=0)  # the first sits out: 0, 0, 2 and 2
    assert world.reports[-1].credits_wanted == 2
    world.step(num_credits=2)  # both have theirs: 3, 3, 1 and 1
    assert world.reports[-1].credits_wanted == 2
    assert world.scheduler.statistics().credits == 0
    world.step()  # the two that are needed at the next step come now
    assert world.reports[-1].credits_wanted == 2
    assert world.scheduler.statistics().credits == 2


def test_nothing_is_wanted_for_tokens_that_are_never_computed() -> None:
    world = World()
    world.start((2, 3), 2, max_tokens=1)
    world.start((2, 3), max_tokens=3)  # the last of them is only sampled: four are computed
    world.run()
    assert [report.credits_wanted for report in world.reports if report.credits_wanted] == []
    assert len(world.events) == 2 + 3


def test_forks_copy_a_shared_tail_and_the_last_owner_writes_in_place() -> None:
    world = World()
    world.start((2, 3, 4, 5, 6, 7), 3, max_tokens=6)
    world.step()
    assert world.reports[-1].credits_wanted == 2
    plan = world.step()
    assert plan is not None
    shared = plan.scheduled[-1].sequence.block_table[1]
    assert [source for source, _ in plan.copies] == [shared, shared]
    assert [(copied.choice, copied.index) for copied in world.reports[-1].copied] == [(0, 1), (1, 1)]
    assert world.reports[-1].forked[0].children == (1, 2)


def test_forks_at_a_block_boundary_copy_nothing() -> None:
    world = World()
    world.start((2, 3, 4, 5), 2, max_tokens=6)
    world.step()
    plan = world.step()
    assert plan is not None
    assert plan.copies == ()
    assert [taken.choice for taken in world.reports[-1].taken] == [0, 1]


def test_a_fork_that_ends_at_its_first_token_leaves_its_tail_to_the_others() -> None:
    world = World()
    world.start((2, 3, 4), 4, max_tokens=1)
    world.run()
    assert [ended.choice for ended in world.reports[-1].ended] == [0, 1, 2, 3]
    assert all(report.copied == () for report in world.reports)
    assert len(world.manager.free) == 200


def test_cancel_and_preempt_are_acknowledged_by_the_next_report() -> None:
    world = World()
    cancelled, preempted = world.start((2, 3)), world.start((4, 5))
    world.step()
    world.step()
    world.scheduler.handle(Directives(cancels=(cancelled, 77), preempts=(preempted, 78)))
    world.scheduler.schedule()
    report = world.scheduler.report()
    assert report is not None
    assert [(ended.start_id, ended.reason) for ended in report.ended] == [
        (cancelled, "cancelled"),
        (preempted, "preempted"),
    ]
    assert list(report.ended[1].new_token_ids) == world.output(1)


def test_a_resumed_sequence_goes_on_at_its_position() -> None:
    world = World()
    sampling = SamplingParams(max_tokens=6, seed=0, ignore_eos=True, prompt_logprobs=0)
    output = expected_output((2, 3, 4), 0, sampling, 100)[0]
    given = SequenceStart(0, tuple(output[:3]), ((0, 1), (1, 1)), 0)
    world.scheduler.handle(
        Directives(starts=(Start(9, "job-0", 1, "ipc://x", (2, 3, 4), sampling, (given,)),))
    )
    world.engine.may_write = lambda block_id, key: None
    events: list[TokenEvent] = []
    while (plan := world.scheduler.schedule()) is not None:
        events += world.scheduler.update(plan, world.engine.execute(plan))["ipc://x"]
    assert [event.position for event in events] == [3, 4, 5]
    assert [event.token_ids[0] for event in events] == output[3:]
    assert all(event.prompt_logprobs is None and event.attempt == 1 for event in events)


def test_a_start_with_everything_cached_is_a_programmer_error() -> None:
    world = World()
    given = SequenceStart(0, (), ((0, 1),), 4)
    start = Start(1, "job-0", 0, "ipc://x", (1, 2, 3, 4), SamplingParams(1, 0), (given,))
    with pytest.raises(AssertionError, match="4 tokens, 4 cached"):
        world.scheduler.handle(Directives(starts=(start,)))


def test_look_ahead_covers_the_next_step_that_needs_blocks() -> None:
    assert look_ahead({}) == 0
    assert look_ahead({7: 2}) == 2
    assert look_ahead({9: 4, 1: 3, 3: 2}) == 3
