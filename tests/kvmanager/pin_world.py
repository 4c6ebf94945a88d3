"""The small world with pins, and what the naive model knows of them: which tokens each has to keep."""

from collections.abc import Callable
from typing import NamedTuple

from kvmanager.protocol import Pin, PinsAnswer, PinsQuery, Unpin
from kvmanager.scheduling.pins import NamedPin, PinKey
from kvmanager.state import Policy
from services.backend import in_parts
from tests.kvmanager.fake_clients import BLOCK_SIZE, FakeFrontend
from tests.kvmanager.world import World

LONGEST = 1000.0  # seconds that any pin lasts


class Kept(NamedTuple):
    salt: str
    tokens: tuple[int, ...]
    expires_at: float


class PinWorld(World):
    """Two in five blocks may be pinned. Two `part`s of a pin are done by one message or tick."""

    disturbed = False  # `between` does something
    between: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, num_blocks: int, part: int = 256) -> None:
        self.kept: dict[str, Kept] = {}
        self.refused: dict[str, int] = {}  # code → how often
        super().__init__(num_blocks, Policy(6, 0.05, 1e9, 100.0, pin_budget=0.4, pin_part=part))

    def ask(self, frontend: FakeFrontend, message: Pin | Unpin | PinsQuery) -> PinsAnswer | None:
        """None if the frontend has no session with this start of the manager, or has it no more when the
        answer is due. The text comes in parts of four tokens; `between` these, and until the answer, anything
        may happen.
        """
        parts = in_parts(message, 4)
        while True:
            if (part := next(parts, None)) is not None:
                if not frontend.send(part):
                    return None
            elif self.core.state.pins.jobs:
                self.wait(0.0)
            else:
                assert self.disturbed, "no answer though nothing is under way"
                return None
            if answers := [each for each in frontend.inbox if isinstance(each, PinsAnswer)]:
                break
            self.between()
        (answer,) = answers
        frontend.inbox.remove(answer)
        if answer.code:
            self.refused[answer.code] = self.refused.get(answer.code, 0) + 1
        return answer

    def cached(self, salt: str, tokens: tuple[int, ...]) -> int:
        """With how many of these tokens a cached text begins: full blocks, then the most alike tail."""
        findable, end = set(self.content.values()), 0
        while end + BLOCK_SIZE <= len(tokens) and (salt, tokens[: end + BLOCK_SIZE]) in findable:
            end += BLOCK_SIZE
        return end + self.longest_tail(salt, (*tokens, -1), end)

    def pin(self, frontend: FakeFrontend, name: str, tokens: tuple[int, ...], salt: str, ttl: float) -> None:
        length, before = self.cached(salt, tokens), self.there()
        answer = self.ask(frontend, Pin(7, name, tokens, salt, ttl))
        if answer is None:
            self.look_up(name, salt, tokens)
            return
        assert answer.query_id == 7
        if answer.code and not self.disturbed:
            assert self.there() == {key: pin for key, pin in before.items() if pin.expires_at > self.now}
        match answer.code:
            case "":
                (listed,) = (pin for pin in answer.pins if pin.name == name)
                assert listed.tokens == length or self.disturbed
                self.kept[name] = Kept(salt, tokens[: listed.tokens], self.now + listed.expires_in)
                assert listed.expires_in <= ttl + 1e-6
            case "not_cached":
                assert length == 0 or self.disturbed
            case "pin_budget":
                assert answer.pinned_blocks - (-length // BLOCK_SIZE) > answer.budget_blocks or self.disturbed
            case _:
                assert answer.code == "pin_busy"
                assert any(each.requests for each in self.of_kind(FakeFrontend)) or self.disturbed
        self.compare(answer)

    def there(self) -> dict[PinKey, NamedPin]:
        pins = self.core.state.pins.by_key
        return {key: pin for key, pin in pins.items() if pin.expires_at > self.now}

    def look_up(self, name: str, salt: str, tokens: tuple[int, ...]) -> None:
        """Nobody was told what became of a pin: it is there whole, or that before it is, or none."""
        pin, old = self.there().get(("", name)), self.kept.pop(name, None)
        if pin is not None:
            owner, text = self.content[pin.blocks[-1]]
            held = Kept(owner, text[: pin.num_tokens], pin.expires_at)
            assert (owner, held.tokens) == (salt, tokens[: pin.num_tokens]) or (
                old is not None and held[:2] == old[:2]
            )
            self.kept[name] = held

    def unpin(self, frontend: FakeFrontend, name: str) -> None:
        known = name in self.kept and self.kept[name].expires_at > self.now + 0.001
        answer = self.ask(frontend, Unpin(8, name))
        if answer is None:
            self.look_up(name, "", ())
            return
        assert (answer.code == "") == known or self.disturbed
        self.kept.pop(name, None)
        self.compare(answer)

    def compare(self, answer: PinsAnswer) -> None:
        """What is listed is what is kept."""
        self.kept = {name: kept for name, kept in self.kept.items() if kept.expires_at > self.now}
        assert [(pin.name, pin.tokens) for pin in answer.pins] == [
            (name, len(kept.tokens)) for name, kept in sorted(self.kept.items())
        ]
        for pin in answer.pins:
            assert pin.blocks == -(-pin.tokens // BLOCK_SIZE)
            assert abs(pin.expires_in - (self.kept[pin.name].expires_at - self.now)) < 1e-6
        assert answer.pinned_blocks <= answer.budget_blocks == int(0.4 * self.num_blocks)

    def check(self) -> None:
        """All that is pinned can still be found, whatever was evicted meanwhile."""
        super().check()
        for name, kept in self.kept.items():
            if kept.expires_at > self.now:
                assert self.cached(kept.salt, kept.tokens) == len(kept.tokens), name

    def finish(self, max_rounds: int = 300) -> None:
        """In the end nothing is pinned."""
        self.wait(LONGEST)
        pins = self.core.state.pins
        while pins.jobs or pins.by_key:  # one may have been on its way
            self.wait(1.0)
        super().finish(max_rounds)
