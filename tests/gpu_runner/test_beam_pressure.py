"""Searches in a pool too small for all of them (33 blocks is just enough for one), with the real core."""

import pytest

from gpu_runner.scheduler import Limits, Scheduler
from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.invariants import audit
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    BeamParams,
    Choice,
    Directives,
    FrontendHello,
    Ready,
    RunnerHello,
    SamplingParams,
    Submit,
    TokenEvent,
    Welcome,
)
from kvmanager.state import Policy
from tests.gpu_runner.fake_engine import FakeEngine
from tests.gpu_runner.test_beam_scheduler import shown, wanted

MAX_MODEL_LEN = 100
MAX_TURNS = 3000


@pytest.mark.parametrize(("num_blocks", "num_requests"), [(33, 4), (34, 3), (60, 6), (200, 4)])
def test_all_come_to_their_end_with_the_right_results(num_blocks: int, num_requests: int) -> None:
    engine = FakeEngine(4, MAX_MODEL_LEN)
    core = Core("boot", "", Policy(), 0.0)
    core.attach(BlockPool(num_blocks, engine.layout))
    faults: list[str] = []
    core.on_fault = faults.append  # type: ignore[method-assign]
    frontend, _ = core.hello(0.0, FrontendHello(PROTOCOL_VERSION, "f", "f", "ipc://f"))
    hello = RunnerHello(PROTOCOL_VERSION, "r", "r", engine.layout, 64, MAX_MODEL_LEN)
    runner, _ = core.hello(0.0, hello)
    assert isinstance(frontend, Welcome)
    assert isinstance(runner, Welcome)
    effects = [core.handle(0.0, runner.session.client_id, Ready())]
    sampling = SamplingParams(24, 0, temperature=0.0, beam=BeamParams(4))
    prompts = [tuple((number + place) % 11 + 2 for place in range(22)) for number in range(num_requests)]
    for number, prompt in enumerate(prompts):
        choices = tuple(Choice(index) for index in range(4))
        submit = Submit(f"{number}", 0, float(number), prompt, choices, sampling)
        effects.append(core.handle(0.0, frontend.session.client_id, submit))
    scheduler = Scheduler(Limits(4, 64, 64, MAX_MODEL_LEN), engine.eos_token_ids)
    events: list[TokenEvent] = []
    for turn in range(MAX_TURNS):
        for effect in effects:
            for _, message in effect.messages:
                if isinstance(message, Directives):
                    scheduler.handle(message)
        plan = scheduler.schedule()
        report = scheduler.report()
        effects = [core.tick(turn * 0.01)]
        if report is not None:
            effects.append(core.handle(turn * 0.01, runner.session.client_id, report))
        assert audit(core.state) == []
        if plan is not None:
            for new in scheduler.update(plan, engine.execute(plan)).values():
                events += new
        if len(shown(events)) == 4 * num_requests and scheduler.report() is None:
            break
    assert faults == []
    for number, prompt in enumerate(prompts):
        found = [event for event in events if event.request_id == f"{number}"]
        assert shown(found) == shown(wanted(prompt, sampling, MAX_MODEL_LEN))
