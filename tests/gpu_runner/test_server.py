"""The runner's loop over real sockets, with a fake manager and an engine without a model."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from gpu_runner.config import RunnerConfig
from gpu_runner.server import Server
from gpu_runner.step import StepOutput, StepPlan
from kvmanager.errors import PagekeeperError
from kvmanager.liveness import HeldLock
from kvmanager.paths import lock_path, prepare
from kvmanager.protocol import (
    Directives,
    Draining,
    Fenced,
    Ready,
    Refused,
    RunnerHello,
    RunnerToManager,
    SamplingParams,
    SequenceStart,
    Session,
    Start,
    StepReport,
    TokenEvent,
    Welcome,
    decode_token_batch,
    encode,
)
from tests.gpu_runner.fake_engine import FakeEngine, expected_output

WAIT_MS = 20_000
PROMPT = (3, 4, 5, 6, 7)
Wanted = TypeVar("Wanted")
decode = msgspec.msgpack.Decoder(RunnerToManager).decode


class ManagerSocket:
    """The manager's end: hands out messages of the runner by type, answers by hand."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> None:
        self.directory = directory
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{directory}/sockets/manager.sock")
        self.identity = b""
        self.session = b""
        self.incarnation = 0
        self.reports: list[StepReport] = []

    def receive(self, wanted: type[Wanted]) -> Wanted:
        """The next message of a type; reports on the way are kept, probes skipped, others are an error."""
        while True:
            assert self.socket.poll(WAIT_MS), f"no {wanted.__name__} came"
            self.identity, _session, body = self.socket.recv_multipart()
            message: Any = decode(body) if body else None
            if isinstance(message, StepReport):
                self.reports.append(message)
            if isinstance(message, wanted):
                return message
            assert message is None or isinstance(message, StepReport | RunnerHello), message

    def send(self, message: object) -> None:
        self.socket.send_multipart([self.identity, self.session, encode(message)])

    def welcome(self) -> RunnerHello:
        hello = self.receive(RunnerHello)
        self.incarnation += 1
        session = Session("boot", 1, self.incarnation)
        self.session = b""
        self.send(Welcome(session, str(self.directory), 32))
        self.session = encode(session)
        self.receive(Ready)
        return hello


class Runner:
    """A server in a thread; what it raised is in `error`."""

    def __init__(self, config: RunnerConfig, engine: FakeEngine) -> None:
        self.server = Server(config, engine)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except PagekeeperError as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()

    def drain(self) -> None:
        self.server.drain()
        self.join()


class GatedEngine(FakeEngine):
    """Computes a step only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def execute(self, plan: StepPlan) -> StepOutput:
        self.began.release()
        assert self.gate.acquire(timeout=WAIT_MS / 1000)
        return super().execute(plan)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    pool_directory = tmp_path / "pool"
    prepare(pool_directory)
    return pool_directory


@pytest.fixture
def manager(context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> ManagerSocket:
    return ManagerSocket(context, directory)


@pytest.fixture
def run(directory: Path) -> Iterator[Callable[..., Runner]]:
    runners: list[Runner] = []

    def start(engine: FakeEngine | None = None, **more: Any) -> Runner:
        settings = {"drain_seconds": 0.0, **more}
        config = RunnerConfig(pool_directory=str(directory), name="r", **settings)
        runners.append(Runner(config, engine or FakeEngine()))
        return runners[-1]

    yield start
    for runner in runners:
        if runner.thread.is_alive():
            runner.drain()


@pytest.fixture
def frontend(context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.PULL)
    socket.bind(endpoint_of(directory))
    return socket


def endpoint_of(directory: Path, name: str = "f") -> str:
    return f"ipc://{directory}/sockets/{name}.sock"


def start_of(endpoint: str, start_id: int = 1, max_tokens: int = 6) -> Start:
    """Its blocks are start_id · 4 and the next."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    blocks = ((start_id * 4, 1), (start_id * 4 + 1, 1))
    return Start(start_id, f"r{start_id}", 0, endpoint, PROMPT, sampling, (SequenceStart(0, (), blocks, 0),))


def outputs(frontend: "zmq.Socket[bytes]", count: int = 1) -> list[TokenEvent]:
    """All events until `count` choices have finished."""
    events: list[TokenEvent] = []
    while sum(event.finish_reason is not None for event in events) < count:
        assert frontend.poll(WAIT_MS), events
        events.extend(decode_token_batch(frontend.recv()).events)
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def expected(max_tokens: int = 6) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return expected_output(PROMPT, 0, sampling, 48)[0]


def test_a_request_over_sockets(
    manager: ManagerSocket, run: Callable[..., Runner], frontend: "zmq.Socket[bytes]", directory: Path
) -> None:
    runner = run(drain_seconds=30.0)
    hello = manager.welcome()
    assert (hello.name, hello.lock, hello.max_num_seqs, hello.max_model_len) == ("r", "r", 64, 48)
    manager.send(Directives(starts=(start_of(endpoint_of(directory)),)))
    while manager.receive(StepReport).credits_wanted == 0:
        continue
    manager.send(Directives(credits=((20, 3), (21, 3))))
    assert tokens(outputs(frontend)) == expected()
    while not manager.reports[-1].ended:
        manager.receive(StepReport)
    assert manager.reports[-1].ended[0].reason == "finished"
    runner.server.drain()
    manager.receive(Draining)
    manager.send(Directives(dismissed=True))
    runner.join()
    assert runner.error is None
    HeldLock(lock_path(directory, "r")).release()


def test_a_fenced_runner_drops_everything_and_says_hello_again(
    manager: ManagerSocket, run: Callable[..., Runner], frontend: "zmq.Socket[bytes]", directory: Path
) -> None:
    engine = FakeEngine()
    run(engine)
    manager.welcome()
    manager.send(Directives(starts=(start_of(endpoint_of(directory), 1, max_tokens=30),)))
    manager.receive(StepReport)  # it waits for a credit soon
    manager.send(Fenced("boot"))
    manager.welcome()
    assert len(engine.attached) == 2
    manager.send(Directives(starts=(start_of(endpoint_of(directory), 1, max_tokens=2),)))
    events = [event for event in outputs(frontend) if event.finish_reason is not None]
    assert events[0].position + len(events[0].token_ids) == 2


def test_a_refusal_ends_the_runner_with_its_reason(
    manager: ManagerSocket, run: Callable[..., Runner]
) -> None:
    runner = run()
    manager.receive(RunnerHello)
    manager.send(Refused("other_layout", "the pool is of another model"))
    runner.join()
    assert isinstance(runner.error, PagekeeperError)
    assert (runner.error.code, runner.error.message) == ("other_layout", "the pool is of another model")


def test_no_manager_ends_the_runner_after_a_bounded_time(run: Callable[..., Runner], directory: Path) -> None:
    runner = run(connect_seconds=0.2)
    runner.join()
    assert isinstance(runner.error, PagekeeperError)
    assert f"no KV manager answered at pool directory {directory}" in runner.error.message
    assert "connect_seconds=0.2" in runner.error.message


def test_a_runner_that_is_stopped_while_it_waits_for_a_manager_ends_well(run: Callable[..., Runner]) -> None:
    runner = run()
    runner.drain()
    assert runner.error is None


def test_a_frontend_that_is_not_there_stops_nobody(
    manager: ManagerSocket, run: Callable[..., Runner], frontend: "zmq.Socket[bytes]", directory: Path
) -> None:
    run(frontend_seconds=0.1)
    manager.welcome()
    starts = (
        start_of(endpoint_of(directory, "nobody"), 1, 3),
        start_of(endpoint_of(directory), 2, 3),
    )
    manager.send(Directives(starts=starts))
    assert tokens(outputs(frontend)) == expected(3)
    ended = [ended.start_id for report in manager.reports for ended in report.ended]
    while len(ended) < 2:
        ended.extend(item.start_id for item in manager.receive(StepReport).ended)
    assert sorted(ended) == [1, 2]


def test_draining_hands_over_what_runs_after_its_tokens_have_left(
    manager: ManagerSocket, run: Callable[..., Runner], frontend: "zmq.Socket[bytes]", directory: Path
) -> None:
    engine = GatedEngine()
    runner = run(engine, drain_seconds=30.0)
    manager.welcome()
    manager.send(Directives(starts=(start_of(endpoint_of(directory), 1, 4),)))
    assert engine.began.acquire(timeout=WAIT_MS / 1000)
    runner.server.drain()
    engine.gate.release()  # the step under way; there is no other
    manager.receive(Draining)
    assert frontend.poll(WAIT_MS)
    assert tokens(list(decode_token_batch(frontend.recv()).events)) == expected(4)[:1]
    manager.send(Directives(starts=(start_of(endpoint_of(directory), 2, 4),), preempts=(1, 2)))
    while not manager.receive(StepReport).ended:
        continue
    first, second = manager.reports[-1].ended
    assert (first.reason, first.new_token_ids, first.num_computed_tokens) == (
        "preempted",
        (expected(4)[0],),
        5,
    )
    assert (second.reason, second.new_token_ids, second.num_computed_tokens) == ("preempted", (), 0)
    assert runner.thread.is_alive()  # it waits until the manager has it all
    manager.send(Directives(dismissed=True))
    runner.join()
    assert runner.error is None


def test_draining_ends_after_its_time_with_requests_left(
    manager: ManagerSocket, run: Callable[..., Runner], frontend: "zmq.Socket[bytes]", directory: Path
) -> None:
    runner = run(drain_seconds=0.0)
    manager.welcome()
    manager.send(Directives(starts=(start_of(endpoint_of(directory), 1, 30),)))
    assert frontend.poll(WAIT_MS)
    runner.drain()
    assert runner.error is None
    assert not any(report.ended for report in manager.reports)


def test_a_manager_that_goes_away_and_comes_back_fences_its_runners(
    context: "zmq.Context[zmq.Socket[bytes]]", run: Callable[..., Runner], directory: Path
) -> None:
    engine = FakeEngine()
    first = ManagerSocket(context, directory)
    run(engine)
    first.welcome()
    first.socket.close()
    second = ManagerSocket(context, directory)
    while not second.session:  # a probe comes first: of a session that this manager does not know
        assert second.socket.poll(WAIT_MS)
        second.identity, second.session, _ = second.socket.recv_multipart()
    second.send(Fenced("boot-2"))
    second.welcome()
    assert len(engine.attached) == 2
