"""Pins by example: what they hold, for how long, within which bounds, and over a restart of the manager."""

from pathlib import Path
from typing import Any

import pytest

from kvmanager import pin_file, pool_directory, records
from kvmanager.asking import pinning
from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, SEALED
from kvmanager.pool.invariants import audit
from kvmanager.protocol import MAX_PART, Cancel, Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from kvmanager.restore import restore_pool
from kvmanager.scheduling.pins import SavedPin
from kvmanager.state import Policy
from tests.kvmanager.asking import Asker
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene

TEXT = tuple(range(100, 110))  # two full blocks and a half


class PinScene(Scene):
    """A frontend and a runner that has computed TEXT, alone in the cache, in three blocks."""

    def __init__(self, num_blocks: int = 16, **policy: Any) -> None:
        super().__init__(num_blocks, **policy)
        self.client, self.worker = self.frontend(), self.runner()
        self.run(self.client, self.worker, submission("first", list(TEXT), max_tokens=1))
        self.received(self.client)

    def ask(self, message: Pin | Unpin | PinsQuery) -> PinsAnswer:
        self.send(self.client, message)
        (answer,) = (each for each in self.received(self.client) if isinstance(each, PinsAnswer))
        return answer

    def pin(
        self, name: str = "p", tokens: tuple[int, ...] = TEXT, salt: str = "", ttl: float = 10.0
    ) -> PinsAnswer:
        return self.ask(Pin(1, name, tokens, salt, ttl))

    def fill(self) -> None:
        """Requests that evict everything that can be evicted."""
        for turn in range(12):
            prompt = list(range(1000 * turn, 1000 * turn + 20))
            self.run(self.client, self.worker, submission(f"fill-{turn}", prompt, max_tokens=1))

    def hits(self, tokens: tuple[int, ...]) -> int:
        """Cached tokens of a request for these and one more."""
        prompt = [*tokens, 9]
        return self.run(
            self.client, self.worker, submission(f"hit-{self.now}", prompt, max_tokens=1)
        ).num_cached_tokens


def test_a_pin_keeps_its_text_when_all_else_is_evicted() -> None:
    scene = PinScene()
    answer = scene.pin(tokens=(*TEXT, 1, 2, 3))
    assert answer == PinsAnswer(1, (Pinned("p", 3, 10, 10.0),), 3, 4)
    scene.fill()
    assert scene.pool.evictions > 0
    assert scene.hits(TEXT) == 10


def test_without_a_pin_it_is_evicted() -> None:
    scene = PinScene()
    scene.fill()
    assert scene.hits(TEXT) == 0


def test_a_pin_ends_with_its_time_and_by_unpin() -> None:
    scene = PinScene()
    scene.pin(ttl=10.0)
    scene.now = 9.0
    assert scene.ask(PinsQuery(2)).pins == (Pinned("p", 3, 10, 1.0),)
    scene.now = 10.0
    scene.take(scene.core.tick(scene.now))
    assert scene.pool.counts[SEALED] == 0
    assert scene.ask(PinsQuery(3)) == PinsAnswer(3, (), 0, 4)
    scene.pin()
    assert scene.ask(Unpin(4, "p")).pins == ()
    assert scene.pool.counts[CACHED] == 3
    gone = scene.ask(Unpin(5, "p"))
    assert (gone.code, gone.message) == ("not_found", "there is no pin 'p'")


def test_one_of_the_same_name_replaces_and_blocks_of_two_count_once() -> None:
    scene = PinScene()
    scene.pin("long")
    answer = scene.pin("short", TEXT[:8])
    assert [(pin.name, pin.blocks, pin.tokens) for pin in answer.pins] == [("long", 3, 10), ("short", 2, 8)]
    assert answer.pinned_blocks == 3
    assert scene.pin("long", TEXT[:4]).pinned_blocks == 2
    assert scene.ask(Unpin(1, "short")).pinned_blocks == 1


def test_the_budget_is_refused_with_its_numbers_and_nothing_changes() -> None:
    scene = PinScene(pin_budget=0.15)
    scene.pin("p", TEXT[:8])
    answer = scene.pin("p", TEXT)
    assert answer.code == "pin_budget"
    assert "3 blocks for pin 'p' would make 3 pinned blocks, and pin_budget allows 2 of 16" in answer.message
    assert answer.pins == (Pinned("p", 2, 8, 10.0),)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Pin(1, "p", (7, 7, 7, 7), "", 1.0), "not_cached"),
        (Pin(1, "p", TEXT, "salt", 1.0), "not_cached"),
        (Pin(1, "p", (), "", 1.0), "not_cached"),
        (Pin(1, "", TEXT, "", 1.0), "invalid_request"),
        (Pin(1, "p" * 129, TEXT, "", 1.0), "invalid_request"),
        (Pin(1, "p", TEXT, "", 0.0), "invalid_request"),
        (Pin(1, "p", TEXT, "", float("nan")), "invalid_request"),
    ],
)
def test_what_cannot_be_pinned_is_refused(message: Pin, code: str) -> None:
    answer = PinScene().ask(message)
    assert (answer.code, answer.pins) == (code, ())
    assert answer.message


def test_what_no_frontend_of_ours_sends_is_dropped() -> None:
    scene = PinScene()
    for tokens in ((-1,), (7,) * (MAX_PART + 1)):
        scene.send(scene.client, Pin(1, "p", tokens, "", 1.0))
    assert not scene.received(scene.client)
    assert scene.core.state.counters.dropped_messages == 2


def test_without_a_pool_nothing_is_pinned() -> None:
    scene = Scene(num_blocks=0)
    client = scene.frontend()
    scene.send(client, Pin(1, "p", TEXT, "", 1.0))
    (answer,) = scene.received(client)
    assert answer.code == "not_ready"


def test_pins_and_requests_never_stand_in_each_others_way() -> None:
    scene = PinScene()
    scene.send(scene.client, submission("large", [5] * 40, max_tokens=20))  # 15 blocks of 16
    answer = scene.pin()
    assert answer.code == "pin_busy"
    assert "may need 15 blocks, and beside 3 pinned ones 13 of 16 would be left" in answer.message
    scene.send(scene.client, Cancel("large", 0))
    assert scene.pin().code == ""
    scene.received(scene.client)
    scene.send(scene.client, submission("again", [5] * 40, max_tokens=20))
    (rejected,) = scene.received(scene.client)
    assert rejected.code == "can_never_fit"
    assert (
        "the pool has 16, of which 3 are pinned; ask for fewer tokens, remove a pin, or" in rejected.message
    )


class LargePins(PinScene):
    """Pins take their blocks, and let go of them, one by one: two by a message or tick."""

    def __init__(self) -> None:
        super().__init__(pin_part=1, pin_budget=0.5)
        self.run(self.client, self.worker, submission("other", OTHER, max_tokens=1))
        self.received(self.client)

    def begin(self, message: Pin | Unpin) -> None:
        self.send(self.client, message)
        assert not self.received(self.client)

    def answer(self) -> PinsAnswer:
        """By ticks."""
        while self.core.state.pins.jobs:
            self.take(self.core.tick(self.now))
        (answer,) = self.received(self.client)
        assert isinstance(answer, PinsAnswer)
        return answer

    def listed(self) -> list[tuple[str, int]]:
        self.send(self.client, PinsQuery(9))
        (answer,) = (each for each in self.received(self.client) if each.query_id == 9)
        return [(pin.name, pin.tokens) for pin in answer.pins]


OTHER = list(range(500, 510))


def test_a_large_pin_is_there_when_it_has_all_and_what_it_replaces_until_then() -> None:
    scene = LargePins()
    scene.begin(Pin(1, "p", TEXT, "", 50.0))
    assert scene.listed() == []
    assert scene.answer().pins == (Pinned("p", 3, 10, 50.0),)
    scene.begin(Pin(2, "p", tuple(OTHER), "", 50.0))
    scene.begin(Unpin(3, "p"))
    assert scene.listed() == [("p", 10)]
    assert scene.pool.counts[SEALED] > 3
    while scene.core.state.pins.jobs:
        scene.take(scene.core.tick(scene.now))
    replaced, ended = scene.received(scene.client)
    assert (replaced.query_id, replaced.pins) == (2, (Pinned("p", 3, 10, 50.0),))
    assert (ended.query_id, ended.pins, scene.pool.counts[SEALED]) == (3, (), 0)


def test_a_large_pin_beside_which_a_request_has_come_meanwhile_is_none() -> None:
    scene = LargePins()
    scene.begin(Pin(1, "p", TEXT, "", 50.0))
    scene.send(scene.client, submission("large", [5] * 40, max_tokens=20))  # 15 blocks of 16
    scene.received(scene.client)
    assert scene.answer().code == "pin_busy"
    assert (scene.listed(), scene.pool.counts[SEALED]) == ([], 0)


def test_a_forced_clear_ends_a_pin_that_is_on_its_way() -> None:
    scene = LargePins()
    scene.begin(Pin(1, "p", TEXT, "", 50.0))
    evicted, in_use = Asker(scene, scene.client).clear(force=True)
    assert (evicted, in_use) == (6, 0)
    assert [answer.code for answer in scene.received(scene.client)] == [""]
    assert (scene.listed(), scene.pool.counts[FREE]) == ([], 16)


def test_a_pin_whose_frontend_goes_away_is_there_whole() -> None:
    scene = LargePins()
    scene.begin(Pin(1, "p", TEXT, "", 50.0))
    scene.take(scene.core.process_died(scene.now, "f"))
    while scene.core.state.pins.jobs:
        scene.take(scene.core.tick(scene.now))
    scene.client = scene.frontend("g")
    assert scene.listed() == [("p", 10)]


def test_the_time_of_a_pin_begins_when_it_is_there_and_one_too_many_is_refused() -> None:
    scene = LargePins()
    for number in range(20):
        scene.send(scene.client, Pin(number, f"p{number}", TEXT, "", 0.5))
    assert scene.received(scene.client)[-1].code == "pin_busy"
    waiting = len(scene.core.state.pins.jobs)
    assert waiting == pinning.MAX_JOBS
    scene.now = 1.0
    while scene.core.state.pins.jobs:
        scene.take(scene.core.tick(scene.now))
    assert [answer.code for answer in scene.received(scene.client)] == [""] * waiting
    assert len(scene.listed()) >= waiting - 1  # but for the one that was under way
    scene.now = 1.6
    scene.take(scene.core.tick(scene.now))
    while scene.core.state.pins.jobs:
        scene.take(scene.core.tick(scene.now))
    assert (scene.listed(), scene.pool.counts[SEALED]) == ([], 0)


def test_a_pin_whose_time_is_over_while_it_lets_go_of_the_one_before_was_made() -> None:
    scene = LargePins()
    scene.begin(Pin(1, "p", TEXT, "", 50.0))
    while scene.core.state.pins.jobs:
        scene.take(scene.core.tick(scene.now))
    scene.received(scene.client)
    scene.begin(Pin(2, "p", TEXT[:8], "", 0.5))
    while scene.core.state.pins.jobs:
        scene.now += 0.3
        scene.take(scene.core.tick(scene.now))
    made, *_ = [each for each in scene.received(scene.client) if each.query_id == 2]
    assert made.code == ""
    assert [pin.name for pin in made.pins] == ["p"]
    assert scene.listed() == []


def restarted(scene: Scene, saved: list[SavedPin], damaged: int | None = None, now: float = 5.0) -> Core:
    """A new manager on the old one's records and saved pins."""
    kept = [records.pack(scene.pool.record(block), BLOCK_SIZE) for block in range(scene.pool.num_blocks)]
    read = [records.unpack(each, BLOCK_SIZE) for each in kept]
    if damaged is not None:
        read[damaged] = None
    core = Core("next", "/pool", Policy(), now)
    pool, quarantines = restore_pool(LAYOUT, read, ())
    core.attach(pool, quarantines)
    core.restore_pins(now, saved)
    core.tick(now)
    assert audit(core.state) == []
    return core


def test_pins_outlive_the_manager_for_the_rest_of_their_time(tmp_path: Path) -> None:
    scene = PinScene()
    for pin in (
        Pin(1, "short", TEXT[:4], "", 4.0),
        Pin(2, "p", TEXT, "", 10.0),
        Pin(3, "no", TEXT, "", 9.0),
        Unpin(4, "no"),
    ):
        pin_file.write(str(tmp_path), scene.core.handle(0.0, scene.client, pin).pins)
    core = restarted(scene, pin_file.read(str(tmp_path)))
    (pin,) = core.state.pins.by_key.values()
    assert (pin.name, pin.num_tokens, len(pin.blocks)) == ("p", 10, 3)
    assert pin.expires_at == pytest.approx(10.0, abs=0.1)
    assert core.tick(10.2).pins == {("", "p"): None}


def test_a_block_that_is_lost_shortens_the_pin() -> None:
    scene = PinScene()
    effects = scene.core.handle(0.0, scene.client, Pin(1, "p", TEXT, "", 10.0))
    saved = [pin for pin in effects.pins.values() if pin is not None]
    for lost, tokens in enumerate((0, 4, 8)):
        blocks = scene.core.state.pins.by_key["", "p"].blocks
        core = restarted(scene, saved, damaged=blocks[lost])
        assert [pin.num_tokens for pin in core.state.pins.by_key.values()] == ([tokens] if tokens else [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-7],
        lambda data: b"",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"\x02", b"\x01", 1),
        lambda data: data.replace(b"\xc4\x40", b"\xc4\x3f", 1),
    ],
)
def test_a_damaged_file_is_no_pin(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert pin_file.read(str(tmp_path)) == []
    saved = {("", name): SavedPin(name, end, 10, bytes(64)) for end, name in ((10.0, "p"), (11.0, "../q"))}
    pin_file.write(str(tmp_path), saved)
    assert [pin.name for pin in pin_file.read(str(tmp_path))] == ["p", "../q"]
    assert pin_file.read(str(tmp_path))[0]._replace(expires_at=10.0) == saved["", "p"]
    assert not caplog.text
    path = pin_file.path(str(tmp_path), ("", "p"))
    path.write_bytes(damage(path.read_bytes()))
    assert [pin.name for pin in pin_file.read(str(tmp_path))] == ["../q"]
    assert "event=pin_discarded" in caplog.text
    pin_file.write(str(tmp_path), {("", "../q"): None})
    assert pin_file.read(str(tmp_path)) == []


def test_what_cannot_be_saved_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pin_file.write(str(tmp_path / "absent"), {("", "p"): SavedPin("p", 1.0, 1, bytes(32))})
    assert "event=pin_not_saved" in caplog.text


def test_pins_go_with_their_pool(tmp_path: Path) -> None:
    pin_file.write(str(tmp_path), {("", "p"): SavedPin("p", 1.0, 1, bytes(32))})
    pool_directory.remove(str(tmp_path))
    assert pin_file.read(str(tmp_path)) == []
