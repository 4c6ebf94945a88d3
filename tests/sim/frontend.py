"""A frontend's process in the simulator: the real tracker, in a shell like its backend's."""

from collections import deque
from typing import TYPE_CHECKING, Final

from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Fenced,
    FrontendHello,
    SamplingParams,
    StatsQuery,
    Submit,
    Welcome,
    decode_token_batch,
)
from services.tracker import MAX_LOSSES, Effects, Output, Request, Tracker
from tests.sim.model import Text, searched, undisturbed
from tests.sim.network import TokenPipe
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

TICK: Final = 0.25  # seconds
STATS_EVERY: Final = 4  # ticks
TIMEOUT: Final = 1000.0  # seconds; longer than anything is stopped here
MAX_REQUESTS: Final = 1000


class Expected:
    """What a request must give. `losses`: how often anything had died in the world when it was submitted."""

    def __init__(self, request: Request, losses: int) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        self.texts: list[Text] = (
            searched(prompt, sampling)
            if sampling.beam is not None
            else [undisturbed(prompt, output.index, sampling) for output in request.outputs]
        )
        self.never_fits = False
        self.losses = losses


class Frontend(Process):
    """A turn takes one message, whether from the manager or from a runner."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name, FrontendHello(PROTOCOL_VERSION, name, name, name))
        self.tracker = Tracker(TIMEOUT, MAX_REQUESTS)
        self.expected: dict[Request, Expected] = {}  # live requests
        self.pipes: list[TokenPipe] = []
        self._outbox: deque[Submit | Cancel | StatsQuery] = deque()
        self._next_tick = world.now + TICK
        self._ticks = 0

    # --- from the clients -----------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        num_choices: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
        read_cache: bool = True,
        never_fits: bool = False,
    ) -> None:
        request = Request(
            request_id,
            tuple(prompt),
            sampling,
            [Output(index) for index in range(num_choices)],
            self.world.now,
            priority,
            cache_salt,
            read_cache,
        )
        expected = self.expected[request] = Expected(request, self.world.losses)
        expected.never_fits = never_fits
        self.world.trace(self.name, "submits", request)
        self._apply(self.tracker.submit(self.world.now, request))

    def cancel(self, request: Request) -> None:
        self.world.trace(self.name, "cancels", request.request_id)
        del self.expected[request]
        self._apply(self.tracker.cancel(request))

    def stop(self, request: Request, index: int) -> None:
        """A stop string was found in one choice."""
        if not request.outputs[index].finish_reason:
            self.world.trace(self.name, "stops", (request.request_id, index))
            self._apply(self.tracker.stop(request, index, "stop string"))
            if request.done:
                self._ended(request)

    @property
    def pipes_full(self) -> bool:
        return any(pipe.batches for pipe in self.pipes)

    # --- the loop -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        full = [pipe for pipe in self.pipes if pipe.batches]
        if full and (not self.connection.down or self.world.random.random() < 0.7):
            self._take_tokens(self.world.random.choice(full))
        elif self.connection.down:
            self._take_message()
        elif self.session.session is None:
            self.repeat_hello()
        if self.world.now >= self._next_tick:
            self._tick()
        while self._outbox and self.session.session is not None:
            self.send(self._outbox.popleft())

    def _take_tokens(self, pipe: TokenPipe) -> None:
        batch = decode_token_batch(pipe.batches.popleft())
        self.world.count(True)
        self.world.trace(self.name, "gets", batch)
        if not pipe.batches and not pipe.runner_lives:
            self.pipes.remove(pipe)
        self._apply(self.tracker.tokens(self.world.now, batch))

    def _take_message(self) -> None:
        message = self.receive()
        if isinstance(message, Welcome):
            self._outbox.clear()  # all of it belongs to an earlier session
            self._apply(self.tracker.connect(self.world.now))
        elif message is not None:
            self._apply(self.tracker.heard(self.world.now, message))
            if isinstance(message, Fenced):
                self.tracker.disconnect()
                self.say_hello()

    def _tick(self) -> None:
        self._next_tick = self.world.now + TICK
        self._ticks += 1
        self._apply(self.tracker.tick(self.world.now))
        self.probe()
        if self._ticks % STATS_EVERY == 0 and self.tracker.connected:
            self._outbox.append(StatsQuery(0))

    # --- what comes out -------------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> None:
        self._outbox.extend(effects.send)
        for request in dict.fromkeys(effects.changed):
            self._check(request)

    def _check(self, request: Request) -> None:
        """No token is missing, none is there twice, and nothing ends but as it should."""
        expected = self.expected.get(request)
        assert expected is not None, f"{request.request_id} changed after its end"
        for output, text in zip(request.outputs, expected.texts, strict=True):
            got = output.token_ids
            assert got == text.tokens[: len(got)], (
                f"{request.request_id}/{output.index}: {got}, want {text.tokens}"
            )
            if output.finish_reason is not None and output.stop_reason != "stop string":
                assert (len(got), output.finish_reason) == (len(text.tokens), text.finish_reason), (
                    f"{request.request_id}/{output.index} ends with {output.finish_reason} after {len(got)} "
                    f"tokens, want {text.finish_reason} after {len(text.tokens)}"
                )
        if request.done:
            self._ended(request)

    def _ended(self, request: Request) -> None:
        expected = self.expected.pop(request)
        statistics = self.world.statistics
        if request.error is None:
            assert not expected.never_fits, f"{request.request_id} can never fit and has finished"
            statistics["finished searches" if request.sampling.beam else "finished"] += 1
        elif expected.never_fits:
            assert request.error.code == "can_never_fit", request.error.message
            statistics["refused"] += 1
        elif request.error.code == "internal" and request.losses > MAX_LOSSES:
            died = self.world.losses - expected.losses
            assert died > MAX_LOSSES, f"{request.request_id}: {request.error.message}, and only {died} died"
            statistics["given up"] += 1
        else:
            raise AssertionError(f"{request.request_id}: {request.error.code}: {request.error.message}")

    def killed(self) -> None:
        super().killed()
        self.pipes.clear()
        self.expected.clear()
