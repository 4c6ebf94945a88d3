"""The tracker: any sequence of events against what a client must see."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.protocol import (
    Accepted,
    Claimed,
    NotHeld,
    RunnerLost,
    Submit,
    TokenBatch,
)
from services.tracker import MAX_LOSSES, Effects, Tracker
from tests.services.test_tracker import event, new_request


def truth(choice: int, length: int) -> list[int]:
    """What choice produces, whoever computes it: sampling is a function of (seed, choice, position)."""
    return [1000 * (choice + 1) + position for position in range(length)]


class World:
    """A manager and runner that always continue what they are given, die at any moment, and repeat
    themselves.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lengths = [self.random.randint(1, 12) for _ in range(self.random.randint(1, 3))]
        self.request = new_request(choices=len(self.lengths))
        self.tracker = Tracker(1e9, 10)
        self.submit: Submit | None = None
        self.sent: dict[int, int] = {}
        self.held: tuple[Submit, dict[int, int]] | None = None  # what runs over the manager's restart
        self.losses = 0

    def apply(self, effects: Effects) -> None:
        for message in effects.send:
            if isinstance(message, Claimed):
                continue
            assert isinstance(message, Submit)
            if message.claim and self.held is not None:
                assert message.attempt == self.held[0].attempt
                self.submit, self.sent = self.held
                self.apply(self.tracker.heard(0.0, Accepted("r", message.attempt)))
                continue
            if message.claim:
                self.apply(self.tracker.heard(0.0, NotHeld((("r", message.attempt),))))
                continue
            self.submit = message
            self.sent = {choice.index: len(choice.output_token_ids) for choice in message.choices}
            for choice in message.choices:
                known = truth(choice.index, self.lengths[choice.index])
                assert list(choice.output_token_ids) == known[: len(choice.output_token_ids)]

    def produce(self) -> None:
        if self.submit is None or not self.sent:
            return
        index = self.random.choice(list(self.sent))
        known = truth(index, self.lengths[index])
        start = max(0, self.sent[index] - self.random.choice((0, 0, 0, 1, 2)))
        end = min(len(known), self.sent[index] + self.random.randint(1, 3))
        self.sent[index] = end
        made = event(
            self.request,
            start,
            tuple(known[start:end]),
            attempt=self.submit.attempt,
            choice=index,
            finish_reason="length" if end == len(known) else None,
        )
        self.apply(self.tracker.tokens(0.0, TokenBatch((made,))))

    def die(self) -> None:
        if self.submit is not None and self.losses < MAX_LOSSES:
            self.losses += 1
            self.apply(self.tracker.heard(0.0, RunnerLost((("r", self.submit.attempt),))))

    def restart(self) -> None:
        """The manager's: the runner goes on, or is gone as well."""
        self.tracker.disconnect()
        goes_on = self.submit is not None and self.sent and self.random.random() < 0.5
        self.held = (self.submit, self.sent) if self.submit is not None and goes_on else None
        self.submit, self.sent = None, {}
        self.apply(self.tracker.connect(0.0))


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.sampled_from(["produce", "produce", "die", "restart"]), max_size=40),
)
def test_no_history_loses_or_repeats_a_token(seed: int, steps: list[str]) -> None:
    world = World(seed)
    world.apply(world.tracker.submit(0.0, world.request))
    for step in steps:
        getattr(world, step)()
    if not world.request.done:
        world.restart()
    while not world.request.done:
        world.produce()
    for output, length in zip(world.request.outputs, world.lengths, strict=True):
        assert output.token_ids == truth(output.index, length)
        assert output.finish_reason == "length"
    assert world.request.error is None
    assert world.tracker.live == {}
