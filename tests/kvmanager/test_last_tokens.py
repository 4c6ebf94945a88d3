"""A runner tells the manager of a finished sequence, and dies before the frontend has its last tokens."""

from typing import Any

import pytest

from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Choice,
    Ended,
    FrontendHello,
    Layout,
    Ready,
    RunnerHello,
    RunnerLost,
    SamplingParams,
    StepReport,
    Submit,
)
from kvmanager.state import Policy

LAYOUT = Layout("fingerprint", "float32", 4, 1, 1, 2)
FRONTEND, RUNNER = 1, 2


@pytest.fixture
def core() -> Core:
    """A frontend, a runner, and a request with two choices that is started as number 1."""
    core = Core("boot", "/pool", Policy(), 0.0)
    core.attach(BlockPool(16, LAYOUT))
    core.hello(0.0, FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc://tokens"))
    core.hello(0.0, RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, 4, 100))
    core.handle(0.0, RUNNER, Ready())
    choices = (Choice(0, (7,)), Choice(1, (8,)))
    core.handle(0.0, FRONTEND, Submit("request", 3, 0.0, (1, 2), choices, SamplingParams(9, 1)))
    return core


def lost(core: Core) -> list[tuple[int, Any]]:
    messages = core.process_died(1.0, "runner").messages
    return [(client, message) for client, message in messages if isinstance(message, RunnerLost)]


def test_a_finished_request_is_named_when_its_runner_dies(core: Core) -> None:
    ended = (Ended(1, 0, (), 2, "finished"), Ended(1, 1, (), 2, "finished"))
    core.handle(0.0, RUNNER, StepReport(ended=ended))
    assert lost(core) == [(FRONTEND, RunnerLost((("request", 3),)))]


def test_so_is_one_that_has_moved_on_with_its_other_choice(core: Core) -> None:
    core.hello(0.0, RunnerHello(PROTOCOL_VERSION, "other", "other", LAYOUT, 4, 100))
    ended = (Ended(1, 0, (), 2, "finished"), Ended(1, 1, (), 2, "preempted"))
    core.handle(0.0, RUNNER, StepReport(ended=ended))
    assert lost(core) == [(FRONTEND, RunnerLost((("request", 3),)))]


def test_a_frontend_that_has_gone_is_told_nothing(core: Core) -> None:
    core.handle(0.0, RUNNER, StepReport(ended=(Ended(1, 0, (), 2, "finished"),)))
    core.process_died(0.5, "frontend")
    assert lost(core) == []
