"""Pins by example: what they hold, for how long, within which bounds, and over a restart of the manager."""

from pathlib import Path
from typing import Any

import pytest

from kvmanager import pin_file, pool_directory, records
from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, SEALED
from kvmanager.pool.invariants import audit
from kvmanager.protocol import Cancel, Pin, Pinned, PinsAnswer, PinsQuery, Unpin
from kvmanager.restore import restore_pool
from kvmanager.scheduling.pins import SavedPin
from kvmanager.state import Policy
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
        (Pin(1, "p", (-1,), "", 1.0), "invalid_request"),
    ],
)
def test_what_cannot_be_pinned_is_refused(message: Pin, code: str) -> None:
    answer = PinScene().ask(message)
    assert (answer.code, answer.pins) == (code, ())
    assert answer.message


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
    scene.core.handle(0.0, scene.client, Pin(1, "short", TEXT[:4], "", 4.0))
    effects = scene.core.handle(0.0, scene.client, Pin(2, "p", TEXT, "", 10.0))
    assert effects.pins is not None
    pin_file.write(str(tmp_path), effects.pins)
    core = restarted(scene, pin_file.read(str(tmp_path)))
    (pin,) = core.state.pins.by_name.values()
    assert (pin.name, pin.num_tokens, len(pin.blocks)) == ("p", 10, 3)
    assert pin.expires_at == pytest.approx(10.0, abs=0.1)
    assert core.tick(10.2).pins == []


def test_a_block_that_is_lost_shortens_the_pin() -> None:
    scene = PinScene()
    scene.pin()
    pins = scene.core.state.pins
    for lost, tokens in enumerate((0, 4, 8)):
        blocks = pins.by_name["", "p"].blocks
        core = restarted(scene, pins.saved(scene.pool), damaged=blocks[lost])
        assert [pin.num_tokens for pin in core.state.pins.by_name.values()] == ([tokens] if tokens else [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-7],
        lambda data: b"",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"1", b"2", 1),
    ],
)
def test_a_damaged_file_is_no_pins(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert pin_file.read(str(tmp_path)) == []
    saved = [SavedPin("p", 10.0, 10, (bytes(32), bytes(32)))]
    pin_file.write(str(tmp_path), saved)
    assert [pin._replace(expires_at=10.0) for pin in pin_file.read(str(tmp_path))] == saved
    assert not caplog.text
    pin_file.path(str(tmp_path)).write_bytes(damage(pin_file.path(str(tmp_path)).read_bytes()))
    assert pin_file.read(str(tmp_path)) == []
    assert "event=pins_discarded" in caplog.text


def test_what_cannot_be_saved_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pin_file.write(str(tmp_path / "absent"), [])
    assert "event=pins_not_saved" in caplog.text


def test_pins_go_with_their_pool(tmp_path: Path) -> None:
    pin_file.write(str(tmp_path), [])
    pool_directory.remove(str(tmp_path))
    assert not pin_file.path(str(tmp_path)).exists()
