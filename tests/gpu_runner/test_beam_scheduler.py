"""Beams in the scheduler: forks, drops, copies and credits; found is what a naive search finds."""

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_runner.stop_conditions import Finish, finish
from kvmanager.protocol import (
    BeamParams,
    BeamScore,
    Directives,
    SamplingParams,
    SearchState,
    TokenEvent,
    TokenLogprobs,
)
from tests.gpu_runner.beam_twin import search
from tests.gpu_runner.fake_engine import EOS, STOP, expected_output, logprob_of, next_logprobs
from tests.gpu_runner.fake_manager import Job
from tests.gpu_runner.test_scheduler import ALL, World, planned

MAX_STEPS = 2000

beams = st.builds(
    BeamParams,
    st.integers(1, 5),
    st.sampled_from((-0.5, 0.0, 1.0, 2.0)),
    st.sampled_from((False, True, "never")),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    seed=st.just(0),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from(((), (STOP,), (STOP, EOS))),
    prompt_logprobs=st.sampled_from((None, 0)),
    beam=beams,
)


def wanted(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int) -> list[TokenEvent]:
    """The events of an undisturbed search, as far as they do not depend on the start."""

    def judge(token_id: int, length: int) -> Finish:
        return finish(token_id, length, len(prompt) + length, sampling, {EOS}, max_model_len)

    def model(output: Sequence[int]) -> list[float]:
        return next_logprobs([*prompt, *output], sampling, len(output))

    assert sampling.beam is not None
    max_tokens = min(sampling.max_tokens, max_model_len - len(prompt))
    return [
        TokenEvent(
            "", 0, choice, 0, end.token_ids, 0, None, None, *end.finish, BeamScore(end.value, end.score)
        )
        for choice, end in enumerate(search(sampling.beam, max_tokens, judge, model))
    ]


def shown(events: Sequence[TokenEvent]) -> list[tuple[object, ...]]:
    return [
        (event.choice, event.position, event.token_ids, event.finish_reason, event.stop_reason, event.beam)
        for event in events
        if event.search is None
    ]


def start(world: World, prompt: tuple[int, ...], beam: BeamParams, **sampling: object) -> SamplingParams:
    world.start(prompt, beam.width, beam=beam, **sampling)
    return world.manager.jobs[world.manager.last_start_id].sampling


def test_the_results_come_whole_and_at_the_end() -> None:
    world = World()
    sampling = start(world, (5, 6, 7), BeamParams(3), max_tokens=9)
    steps = world.run()
    assert steps == 9
    assert shown(world.events) == shown(wanted((5, 6, 7), sampling, 100))
    assert {len(event.token_ids) for event in world.events if event.search is None} == {9}
    assert len(world.manager.free) == 200


def test_where_a_search_stands_is_told_when_a_block_is_full_and_another_goes_on_from_there() -> None:
    """Blocks of four tokens: the prompt's own takes one token more."""
    world = World()
    sampling = start(world, (5, 6, 7), BeamParams(3), max_tokens=12, prompt_logprobs=0)
    world.run()
    told = [event for event in world.events if event.search]
    states = [event.search for event in told if event.search]
    assert [{len(beam.token_ids) for beam in state.beams} for state in states] == [{2}, {6}, {10}]
    assert [event.prompt_logprobs is None for event in told] == [False, True, True]
    for state in states:
        other = World()
        job = Job(0, (5, 6, 7), sampling, 3)
        job.go_on(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SearchState))
        resumed = other.manager.start(job, use_cache=True)
        assert resumed is not None
        other.scheduler.handle(Directives(starts=(resumed,)))
        assert other.run() == 12 - len(state.beams[0].token_ids)
        assert shown(other.events) == shown(wanted((5, 6, 7), sampling, 100))
        assert all(event.prompt_logprobs is None for event in other.events)


def test_a_prompt_of_seven_blocks_takes_seven_and_then_at_most_three_copies() -> None:
    """n = 4, 100 tokens, block size 16."""
    world = World(block_size=16, max_num_batched_tokens=200, max_model_len=200)
    start(world, tuple(range(100)), BeamParams(4), max_tokens=3)
    world.step()
    assert sum(map(bool, world.manager.holders.values())) == 7
    assert world.scheduler.statistics().copies == 0
    plan = world.step()
    assert plan is not None
    assert len(plan.scheduled) == 4
    assert len(plan.copies) == 3
    in_tables = {block for table in world.manager.tables.values() for block, _ in table}
    assert len(in_tables) == 7 + 3


def test_sampled_choices_of_that_prompt_take_as_many() -> None:
    world = World(block_size=16, max_num_batched_tokens=200, max_model_len=200)
    world.start(tuple(range(100)), 4, max_tokens=12)
    world.step()
    assert sum(map(bool, world.manager.holders.values())) == 7
    while world.step():
        in_tables = {block for table in world.manager.tables.values() for block, _ in table}
        assert len(in_tables) <= 7 + 3
    assert world.scheduler.statistics().copies == 3


def test_a_preempted_search_tells_once_where_it_stands() -> None:
    """Not before its first token, and not while the prompt's log-probabilities are still to be told."""
    world = World()
    start(world, (5, 6, 7), BeamParams(3), max_tokens=9)
    start(world, (5, 6), BeamParams(2), max_tokens=9, prompt_logprobs=0)
    start_ids = sorted(world.manager.jobs)
    for _ in range(2):
        world.step()
    start(world, (9, 9), BeamParams(2), max_tokens=9)
    world.scheduler.handle(Directives(preempts=(*start_ids, start_ids[-1] + 1)))
    world.step()
    ended = [item for item in world.reports[-1].ended if item.reason == "preempted"]
    (state,) = [item.search for item in ended if item.search]
    assert ended[0].search is state
    assert [len(beam.token_ids) for beam in state.beams] == [2, 2, 2]
    assert len(ended) == 3 + 2 + 1


def test_dropped_beams_are_told_with_the_forks_that_replace_them() -> None:
    world = World()
    start(world, (5, 6, 7), BeamParams(4), max_tokens=30)
    world.run()
    reports = [report for report in world.reports if report.forked]
    dropped = [sum(end.reason == "dropped" for end in report.ended) for report in reports]
    forked = [sum(len(fork.children) for fork in report.forked) for report in reports]
    assert forked == [3, *dropped[1:]]
    assert sum(dropped) > 10
    numbers = {child for report in world.reports for fork in report.forked for child in fork.children}
    assert numbers <= set(range(2 * 4 - 1))


def test_the_sequences_of_a_search_never_exceed_its_width() -> None:
    world = World()
    start(world, (5, 6, 7), BeamParams(4), max_tokens=30)
    while world.step():
        assert world.scheduler.statistics().sequences <= 4


def test_a_search_waits_for_a_beam_that_sits_out() -> None:
    world = World()
    sampling = start(world, (2, 3, 4, 5), BeamParams(3), max_tokens=5)
    world.step()
    assert len(planned(world.step(num_credits=2))) == 2
    assert world.step(num_credits=0) is None
    assert world.scheduler.statistics().sat_out == 2
    assert len(planned(world.step(num_credits=1))) == 1
    world.run()
    assert shown(world.events) == shown(wanted((2, 3, 4, 5), sampling, 100))


def test_greedy_sampled_and_beam_requests_run_in_one_batch() -> None:
    world = World()
    sampling = start(world, (2, 3, 4), BeamParams(2), max_tokens=6)
    world.start((5, 6), max_tokens=6)
    world.start((5, 6, 8), 2, max_tokens=6)
    world.step()
    assert sorted(planned(world.step())) == [(1, 1), (1, 1), (2, 1), (3, 1), (3, 1)]
    world.run()
    assert shown([event for event in world.events if event.request_id == "job-0"]) == shown(
        wanted((2, 3, 4), sampling, 100)
    )
    plain = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    assert world.output(1) == expected_output((5, 6), 0, plain, 100)[0]
    assert world.output(2, 1) == expected_output((5, 6, 8), 1, plain, 100)[0]


def test_a_search_is_cancelled_as_a_whole() -> None:
    world = World()
    start(world, (2, 3, 4), BeamParams(3), max_tokens=20)
    world.step()
    world.step()
    world.scheduler.handle(Directives(cancels=(1,)))
    assert world.step() is None
    assert {end.reason for end in world.reports[-1].ended[-3:]} == {"cancelled"}
    assert world.manager.jobs == {}
    assert len(world.manager.free) == 200


def test_prompt_logprobs_come_with_the_best_choice() -> None:
    world = World()
    start(world, (2, 3, 4), BeamParams(2), max_tokens=2, prompt_logprobs=0)
    world.run()
    first: list[TokenLogprobs | None] = [None, logprob_of(3), logprob_of(4)]
    assert [event.prompt_logprobs for event in world.events] == [tuple(first), None]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    max_tokens=st.integers(1, 30),
)
@settings(deadline=None)
def test_with_its_credits_granted_no_beam_ever_sits_out(
    lengths: list[int], widths: list[int], max_tokens: int
) -> None:
    world = World(num_blocks=1000)
    for index, length in enumerate(lengths):
        start(world, (index + 2,) * length, BeamParams(widths[index]), max_tokens=max_tokens)
        world.step()
    world.run()
    assert world.scheduler.statistics().sat_out == 0
    assert world.manager.credits_held == set()
    assert len(world.manager.free) == 1000


class BeamMachine(RuleBasedStateMachine):
    """Searches among other requests, with few blocks, credits that come late, cancels and preemptions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_blocks=60, max_num_seqs=12, max_num_batched_tokens=9, max_model_len=48)
        self.jobs: list[Job] = []
        self.cancelled: set[int] = set()

    @rule(length=st.integers(1, 30), sampling=samplings, plain=st.booleans(), use_cache=st.booleans())
    def submit(self, length: int, sampling: SamplingParams, plain: bool, use_cache: bool) -> None:
        prompt = tuple(position % 11 + 2 for position in range(length))
        if plain:
            sampling = SamplingParams(max_tokens=sampling.max_tokens, seed=0, ignore_eos=True)
        width = 2 if sampling.beam is None else sampling.beam.width
        job = Job(len(self.jobs), prompt, sampling, width)
        self.jobs.append(job)
        self.start(job, use_cache and sampling.prompt_logprobs is None)

    @precondition(lambda self: any(self.stopped()))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A search goes on from any of the states that were told, or begins anew."""
        job = data.draw(st.sampled_from(self.stopped()))
        told = [e.search for e in self.world.events if e.request_id == f"job-{job.number}" and e.search]
        if job.sampling.beam is not None:
            job.go_on(data.draw(st.sampled_from([None, *told, *job.told])))
        self.start(job, False)

    @rule(num_credits=st.sampled_from((0, 1, 3, ALL)))
    def step(self, num_credits: int) -> None:
        self.world.step(num_credits)

    @precondition(lambda self: self.world.manager.jobs)
    @rule(data=st.data(), cancel=st.booleans())
    def stop(self, data: st.DataObject, cancel: bool) -> None:
        start_id = data.draw(st.sampled_from(sorted(self.world.manager.jobs)))
        if cancel:
            self.cancelled.add(self.world.manager.jobs[start_id].number)
            self.world.scheduler.handle(Directives(cancels=(start_id,)))
        else:
            self.world.scheduler.handle(Directives(preempts=(start_id,)))
        self.world.step(0)
        assert start_id not in self.world.manager.jobs, "not acknowledged at the next report"

    def stopped(self) -> list[Job]:
        return [job for job in self.jobs if job.open and job.start_id is None]

    def start(self, job: Job, use_cache: bool) -> None:
        if (start := self.world.manager.start(job, use_cache)) is not None:
            self.world.scheduler.handle(Directives(starts=(start,)))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        manager = self.world.manager
        held = [block_id for block_id, holders in manager.holders.items() if holders]
        assert sorted(held + manager.free) == list(range(manager.num_blocks))

    def teardown(self) -> None:
        """All that was not cancelled comes to its end, with the results of a naive search, sent once."""
        manager = self.world.manager
        for _ in range(MAX_STEPS):
            if not manager.jobs and not self.stopped():
                break
            if not manager.jobs:
                self.start(self.stopped()[0], use_cache=False)
            if self.world.step() is None and manager.jobs and not manager.free:
                self.world.scheduler.handle(Directives(preempts=(max(manager.jobs),)))
        assert len(manager.free) == manager.num_blocks
        for job in self.jobs:
            events = [event for event in self.world.events if event.request_id == f"job-{job.number}"]
            if job.sampling.beam is None or (job.number in self.cancelled and not shown(events)):
                continue
            assert shown(events) == shown(wanted(job.prompt, job.sampling, 48))


TestBeams = BeamMachine.TestCase
TestBeams.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
