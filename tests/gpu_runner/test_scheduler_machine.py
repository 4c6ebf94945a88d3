"""The scheduler under any order of starts, credits, cancels, preemptions and steps, against naive models.

The engine reads every token back through the block tables; the manager knows tables from reports alone.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_runner.scheduler import Limits, Scheduler
from kvmanager.protocol import Directives, SamplingParams, Start, TokenEvent
from tests.gpu_runner.fake_engine import EOS, STOP, FakeEngine, expected_output, logprob_of
from tests.gpu_runner.fake_manager import FakeManager, Job

LIMITS = Limits(block_size=4, max_num_seqs=6, max_num_batched_tokens=9, max_model_len=48)
ALL = 1 << 30
MAX_STEPS = 2000  # more than enough to end everything that a run has started

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    seed=st.just(0),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from(((), (STOP,), (STOP, EOS))),
    prompt_logprobs=st.sampled_from((None, 0)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Runs one scheduler; keeps what each frontend has received of each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(LIMITS.block_size, LIMITS.max_model_len)
        self.manager = FakeManager(60, LIMITS.block_size, self.engine.blocks)
        self.engine.may_write = self.manager.may_write
        self.scheduler = Scheduler(LIMITS, self.engine.eos_token_ids)
        self.jobs: list[Job] = []
        self.starts: list[Start] = []
        self.received: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], tuple[str, int | None]] = {}
        self.cancelled: set[int] = set()

    # --- rules ----------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 30),
        kind=st.integers(0, 1),
        num_choices=st.integers(1, 4),
        sampling=samplings,
        use_cache=st.booleans(),
    )
    def submit(
        self, length: int, kind: int, num_choices: int, sampling: SamplingParams, use_cache: bool
    ) -> None:
        """Prompts of one kind share their beginnings."""
        prompt = tuple((kind + 3 * position) % 11 + 2 for position in range(length))
        job = Job(len(self.jobs), prompt, sampling, num_choices)
        self.jobs.append(job)
        self.start(job, use_cache and sampling.prompt_logprobs is None)

    @precondition(lambda self: any(self.stopped()))
    @rule(data=st.data(), use_cache=st.booleans())
    def resume(self, data: st.DataObject, use_cache: bool) -> None:
        job = data.draw(st.sampled_from(self.stopped()))
        self.start(job, use_cache and job.sampling.prompt_logprobs is None)

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def repeat_a_start(self, data: st.DataObject) -> None:
        self.scheduler.handle(Directives(starts=(data.draw(st.sampled_from(self.starts)),)))

    @rule(num_credits=st.sampled_from((0, 1, ALL)))
    def step(self, num_credits: int) -> None:
        self.one_step(num_credits)

    @precondition(lambda self: self.manager.jobs)
    @rule(data=st.data(), cancel=st.booleans())
    def stop(self, data: st.DataObject, cancel: bool) -> None:
        start_id = data.draw(st.sampled_from(sorted(self.manager.jobs)))
        if cancel:
            self.cancelled.add(self.manager.jobs[start_id].number)
            self.scheduler.handle(Directives(cancels=(start_id, 999_999)))
        else:
            self.scheduler.handle(Directives(preempts=(start_id, 999_998)))
        self.one_step(0)
        assert start_id not in self.manager.jobs, "not acknowledged at the next report"

    # --- what they do ---------------------------------------------------------------------------------------

    def stopped(self) -> list[Job]:
        return [job for job in self.jobs if job.open and job.start_id is None]

    def start(self, job: Job, use_cache: bool) -> None:
        if (start := self.manager.start(job, use_cache)) is not None:
            self.starts.append(start)
            self.scheduler.handle(Directives(starts=(start,)))

    def one_step(self, num_credits: int) -> bool:
        """Returns whether anything could run."""
        self.scheduler.handle(self.manager.directives(num_credits))
        plan = self.scheduler.schedule()
        if (report := self.scheduler.report()) is not None:
            self.manager.apply(report)
        assert self.scheduler.report() is None, "nothing has changed since"
        assert self.scheduler.statistics().credits == len(self.manager.credits_held)
        assert len(self.manager.credits_held) <= self.manager.credits_wanted
        if plan is None:
            return False
        assert plan.num_tokens <= LIMITS.max_num_batched_tokens
        assert len(plan.scheduled) <= LIMITS.max_num_seqs
        decodes = [len(item.sequence.token_ids) - item.start == 1 for item in plan.scheduled]
        assert decodes == sorted(decodes, reverse=True)
        for endpoint, events in self.scheduler.update(plan, self.engine.execute(plan)).items():
            for event in events:
                self.take(endpoint, event)
        return True

    def take(self, endpoint: str, event: TokenEvent) -> None:
        job = self.jobs[int(event.request_id.removeprefix("job-"))]
        assert endpoint == f"ipc://{job.number % 2}"
        key = (event.request_id, event.choice)
        output = self.received.setdefault(key, [])
        assert key not in self.finished
        assert event.position == len(output)
        assert (event.prompt_logprobs is not None) == (
            job.sampling.prompt_logprobs is not None and not output
        )
        if event.prompt_logprobs is not None:
            assert event.prompt_logprobs == (None, *map(logprob_of, job.prompt[1:]))
        output.extend(event.token_ids)
        wanted, reason, stop_reason = self.expected(job, event.choice)
        assert output == wanted[: len(output)]
        assert (event.finish_reason is not None) == (len(output) == len(wanted))
        if event.finish_reason is not None:
            assert (event.finish_reason, event.stop_reason) == (reason, stop_reason)
            self.finished[key] = (reason, stop_reason)

    def expected(self, job: Job, choice: int) -> tuple[list[int], str, int | None]:
        return expected_output(job.prompt, choice, job.sampling, LIMITS.max_model_len)

    # --- checks ---------------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = [block_id for block_id, holders in self.manager.holders.items() if holders]
        assert sorted(held + self.manager.free) == list(range(self.manager.num_blocks))

    def teardown(self) -> None:
        """With credits, everything that was not cancelled comes to its end, and all blocks come back."""
        for _ in range(MAX_STEPS):
            if not self.manager.jobs and not self.stopped():
                break
            if not self.manager.jobs:
                self.start(self.stopped()[0], use_cache=False)
            if not self.one_step(ALL) and self.manager.jobs and not self.manager.free:
                self.scheduler.handle(Directives(preempts=(max(self.manager.jobs),)))
        assert len(self.manager.free) == self.manager.num_blocks
        wanted = {
            (f"job-{job.number}", choice)
            for job in self.jobs
            if job.number not in self.cancelled
            for choice in range(job.num_choices)
        }
        assert wanted <= self.finished.keys()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
