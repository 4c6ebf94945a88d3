"""A core with processes that a test moves by hand, one message at a time."""

from typing import Any

from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.invariants import audit
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Directives,
    Ended,
    FrontendHello,
    Ready,
    RunnerHello,
    SequenceStart,
    Start,
    StepReport,
    Submit,
    Welcome,
)
from kvmanager.state import Effects, Policy
from tests.kvmanager.fake_clients import LAYOUT


class Scene:
    """One core. Messages that it sends are kept by client; every event is audited."""

    def __init__(self, num_blocks: int = 16, **policy: Any) -> None:
        self.now = 0.0
        self.core = Core("boot", "/pool", Policy(**{"watermark": 0.0, "growth_room": 0.0, **policy}), 0.0)
        if num_blocks:
            self.core.attach(BlockPool(num_blocks, LAYOUT))
        self.inbox: dict[int, list[Any]] = {}
        self.ended: list[int] = []

    @property
    def pool(self) -> BlockPool:
        assert self.core.state.pool is not None
        return self.core.state.pool

    def take(self, effects: Effects) -> None:
        for client_id, message in effects.messages:
            self.inbox.setdefault(client_id, []).append(message)
        self.ended += effects.ended
        assert audit(self.core.state) == []

    def hello(self, greeting: FrontendHello | RunnerHello) -> int:
        answer, effects = self.core.hello(self.now, greeting)
        self.take(effects)
        assert isinstance(answer, Welcome), answer
        return answer.session.client_id

    def frontend(self, name: str = "f") -> int:
        return self.hello(FrontendHello(PROTOCOL_VERSION, name, name, f"ipc:///{name}"))

    def runner(self, name: str = "r", max_num_seqs: int = 8, max_model_len: int = 100) -> int:
        client = self.hello(RunnerHello(PROTOCOL_VERSION, name, name, LAYOUT, max_num_seqs, max_model_len))
        self.send(client, Ready())
        return client

    def send(self, client: int, message: Any) -> None:
        self.take(self.core.handle(self.now, client, message))

    def received(self, client: int) -> list[Any]:
        """What came since the last look."""
        return self.inbox.pop(client, [])

    def start(self, client: int) -> Start:
        """The one start that came since the last look."""
        (start,) = (start for message in self.received(client) for start in message.starts)
        return start

    def submit(self, frontend: int, runner: int, message: Submit) -> tuple[Start, SequenceStart]:
        """Submit, and the start of it."""
        self.send(frontend, message)
        start = self.start(runner)
        return start, start.sequences[0]

    def run(self, frontend: int, runner: int, message: Submit) -> SequenceStart:
        """Submit, compute the prompt, end."""
        start, sequence = self.submit(frontend, runner, message)
        self.end(runner, start, len(message.prompt_token_ids))
        return sequence

    def end(
        self, runner: int, start: Start, computed: int, reason: Any = "finished", new: tuple[int, ...] = ()
    ) -> None:
        ended = tuple(
            Ended(start.start_id, sequence.choice, new, computed, reason) for sequence in start.sequences
        )
        read = tuple((start.start_id, s.choice) for s in start.sequences if s.copy_from is not None)
        self.send(runner, StepReport(ended=ended, sources_read=read))

    def credits(self, runner: int) -> list[tuple[int, int]]:
        """Credits that came since the last look."""
        return [
            ref
            for message in self.received(runner)
            if isinstance(message, Directives)
            for ref in message.credits
        ]
