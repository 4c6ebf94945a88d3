"""The small world with pins, and what the naive model knows of them: which tokens each has to keep."""

from typing import NamedTuple

from kvmanager.protocol import Pin, PinsAnswer, PinsQuery, Unpin
from kvmanager.state import Policy
from tests.kvmanager.fake_clients import BLOCK_SIZE, FakeFrontend
from tests.kvmanager.world import World

LONGEST = 1000.0  # seconds that any pin lasts


class Kept(NamedTuple):
    salt: str
    tokens: tuple[int, ...]
    expires_at: float


class PinWorld(World):
    """Two in five blocks may be pinned."""

    def __init__(self, num_blocks: int) -> None:
        self.kept: dict[str, Kept] = {}
        self.refused: dict[str, int] = {}  # code → how often
        super().__init__(num_blocks, Policy(6, 0.05, 1e9, 100.0, pin_budget=0.4))

    def ask(self, frontend: FakeFrontend, message: Pin | Unpin | PinsQuery) -> PinsAnswer | None:
        """None if the frontend has no session with this start of the manager."""
        if not frontend.send(message):
            return None
        (answer,) = (each for each in frontend.inbox if isinstance(each, PinsAnswer))
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
        length, before = self.cached(salt, tokens), self.core.state.pins.by_name.copy()
        answer = self.ask(frontend, Pin(7, name, tokens, salt, ttl))
        if answer is None:
            return
        assert answer.query_id == 7
        if answer.code:
            after = self.core.state.pins.by_name
            assert after == {key: pin for key, pin in before.items() if pin.expires_at > self.now}
        match answer.code:
            case "":
                self.kept[name] = Kept(salt, tokens[:length], self.now + ttl)
            case "not_cached":
                assert length == 0
            case "pin_budget":
                assert answer.pinned_blocks - (-length // BLOCK_SIZE) > answer.budget_blocks
            case _:
                assert answer.code == "pin_busy"
                assert any(each.requests for each in self.of_kind(FakeFrontend))
        self.compare(answer)

    def unpin(self, frontend: FakeFrontend, name: str) -> None:
        known = name in self.kept and self.kept[name].expires_at > self.now + 0.001
        answer = self.ask(frontend, Unpin(8, name))
        if answer is not None:
            assert (answer.code == "") == known
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
        assert not self.core.state.pins.by_name
        super().finish(max_rounds)
