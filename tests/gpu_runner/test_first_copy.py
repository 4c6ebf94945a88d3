"""Token-exact hits at the runner: the first step copies what is cached of a block, and then says so."""

from gpu_runner.scheduler import Limits, Scheduler
from gpu_runner.step import Sampled, SequenceOutput, StepOutput, StepPlan
from kvmanager.protocol import Directives, Ended, SamplingParams, SequenceStart, Start, StepReport

SOURCE, COPY = 7, 3


def scheduler(max_num_batched_tokens: int = 64) -> Scheduler:
    return Scheduler(Limits(4, 8, max_num_batched_tokens, 100), frozenset())


def start(start_id: int = 1, num_tokens: int = 8) -> Directives:
    """A prompt of which six tokens are cached: a full block, and two tokens of block SOURCE."""
    sequence = SequenceStart(0, (), ((2, 1), (COPY, 1)), 6, (), (SOURCE, 1))
    prompt = tuple(range(num_tokens))
    return Directives((Start(start_id, "r", 0, "f", prompt, SamplingParams(4, 1), (sequence,)),))


def compute(runner: Scheduler, plan: StepPlan) -> None:
    outputs = tuple(
        SequenceOutput(tuple(Sampled(choice, 9) for choice in item.sample_choices)) for item in plan.scheduled
    )
    runner.update(plan, StepOutput(outputs))


def test_the_first_step_copies_and_the_next_report_says_so() -> None:
    runner = scheduler()
    runner.handle(start())
    plan = runner.schedule()
    assert plan is not None
    assert plan.copies == ((SOURCE, COPY),)
    (item,) = plan.scheduled
    assert (item.start, item.length) == (6, 2)
    report = runner.report()
    assert report is None or report.sources_read == ()
    compute(runner, plan)
    plan = runner.schedule()
    assert plan is None or plan.copies == ()
    report = runner.report()
    assert report is not None
    assert report.sources_read == ((1, 0),)


def test_one_that_has_no_step_yet_copies_nothing() -> None:
    """The budget is gone to an earlier start; the second one copies with its own first step."""
    runner = scheduler(max_num_batched_tokens=2)
    runner.handle(start(1))
    runner.handle(start(2))
    plan = runner.schedule()
    assert plan is not None
    assert [item.sequence.start_id for item in plan.scheduled] == [1]
    assert plan.copies == ((SOURCE, COPY),)


def test_one_that_ends_before_its_first_step_has_read_nothing() -> None:
    runner = scheduler()
    runner.handle(start())
    runner.handle(Directives(cancels=(1,)))
    assert runner.schedule() is None
    assert runner.report() == StepReport(ended=(Ended(1, 0, (), 6, "cancelled"),))
