"""A frontend's process in the simulator: the real tracker, in a shell like its backend's."""

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Claimed,
    Clear,
    Cleared,
    Evict,
    Fenced,
    FrontendHello,
    Pin,
    PinsAnswer,
    Query,
    SamplingParams,
    StatsQuery,
    Submit,
    Unpin,
    Welcome,
    decode_token_batch,
)
from services.backend import in_parts
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


class Kept(NamedTuple):
    """A pin. It ends a little later than this says, as it takes time to get to the manager."""

    num_tokens: int
    expires_at: float  # seconds


class Frontend(Process):
    """A turn takes one message, whether from the manager or from a runner."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name, FrontendHello(PROTOCOL_VERSION, name, name, name))
        self.tracker = Tracker(TIMEOUT, MAX_REQUESTS)
        self.expected: dict[Request, Expected] = {}  # live requests
        self.pipes: list[TokenPipe] = []
        self.pins: dict[str, Kept] = {}  # those that the manager has confirmed
        self._asked: dict[
            str, tuple[float, Pin | Unpin]
        ] = {}  # by name, not answered yet; and when it was sent
        self._queries = 0
        self._outbox: deque[Submit | Claimed | Cancel | Query] = deque()
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

    def pin(self, name: str, tokens: tuple[int, ...], salt: str, ttl: float) -> None:
        self._ask(Pin(self._queries, name, tokens, salt, ttl))

    def unpin(self, name: str) -> None:
        self._ask(Unpin(self._queries, name))

    def command(self, message: Evict | Clear) -> None:
        """A part of it is done; that is enough."""
        if self.tracker.connected:
            self._queries += 1
            self.world.statistics["commands"] += 1
            self._send_parts(msgspec.structs.replace(message, query_id=self._queries))

    def _ask(self, message: Pin | Unpin) -> None:
        """One question about a name at a time."""
        if message.name not in self._asked and self.tracker.connected:
            self._queries += 1
            self._asked[message.name] = (self.world.now, message)
            self._send_parts(message)

    def _send_parts(self, message: Query) -> None:
        """Of its text a few tokens at a time."""
        self._outbox.extend(in_parts(message, self.world.random.choice((3, 100))))

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
        attempts = {request.request_id: request.attempt for request in self.expected}
        self.world.handovers.heard(
            event for event in batch.events if attempts.get(event.request_id) == event.attempt
        )
        self._apply(self.tracker.tokens(self.world.now, batch))

    def _take_message(self) -> None:
        message = self.receive()
        if isinstance(message, Welcome):
            self._outbox.clear()  # all of it belongs to an earlier session
            for name in self._asked:
                self.pins.pop(name, None)  # nobody knows what became of it
            self._asked.clear()
            self._apply(self.tracker.connect(self.world.now))
        elif isinstance(message, Cleared):
            did = "refused" if message.code else "did something" if message.evicted else "did nothing"
            self.world.statistics[f"commands that {did}"] += 1
        elif isinstance(message, PinsAnswer):
            self._pins_answered(message)
        elif message is not None:
            self._apply(self.tracker.heard(self.world.now, message))
            if isinstance(message, Fenced):
                self.tracker.disconnect()
                self.say_hello()

    def _pins_answered(self, answer: PinsAnswer) -> None:
        """What was confirmed is there until it ends, over any death of the manager."""
        listed = {pin.name: pin.tokens for pin in answer.pins}
        sent_at, asked = next(item for item in self._asked.values() if item[1].query_id == answer.query_id)
        del self._asked[asked.name]
        self.world.statistics[f"pins {answer.code}".strip()] += isinstance(asked, Pin)
        if isinstance(asked, Unpin):
            self.pins.pop(asked.name, None)
        elif not answer.code:
            self.pins[asked.name] = Kept(listed[asked.name], sent_at + asked.ttl)
        for name, kept in self.pins.items():
            if kept.expires_at > self.world.now and name not in self._asked:
                assert listed.get(name) == kept.num_tokens, f"pin {name!r} is {kept}, and listed are {listed}"

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
