"""A client's session rules, without sockets, and the lock files that prove life."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmanager import liveness
from kvmanager.client import PROBE_INTERVAL, ClientSession, ManagerClient
from kvmanager.errors import PagekeeperError
from kvmanager.liveness import HeldLock, WatchedLock, held_locks
from kvmanager.paths import lock_path
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Fenced,
    FrontendHello,
    Refused,
    Session,
    Welcome,
    encode,
)

HELLO = FrontendHello(PROTOCOL_VERSION, "f", "f", "ipc:///f")
SESSION = Session("boot", 1, 1)
WELCOME = [b"", encode(Welcome(SESSION, "/pool", 3))]


def connected() -> ClientSession:
    session = ClientSession(HELLO)
    assert session.hello_frames(0.0) == [b"", encode(HELLO)]
    assert session.received(WELCOME) == Welcome(SESSION, "/pool", 3)
    assert session.session == SESSION
    return session


def test_messages_carry_the_session() -> None:
    session = connected()
    assert session.frames(0.0, Cancel("a", 1)) == [encode(SESSION), encode(Cancel("a", 1))]
    assert session.received([encode(SESSION), encode(Accepted("a", 1))]) == Accepted("a", 1)


def test_nothing_can_be_sent_without_a_session() -> None:
    with pytest.raises(PagekeeperError, match="connect first") as caught:
        ClientSession(HELLO).frames(0.0, Cancel("a", 1))
    assert caught.value.code == "manager_absent"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"garbage"],
        [encode(Session("boot", 2, 2)), encode(Accepted("a", 1))],
        [b"", encode(Accepted("a", 1))],
        [encode(SESSION), b"garbage"],
        [b"", encode(Welcome(Session("boot", 9, 9), "/pool", 3))],
    ],
)
def test_what_is_not_of_this_session_is_dropped(frames: list[bytes]) -> None:
    session = connected()
    assert session.received(frames) is None
    assert session.session == SESSION


def test_a_refusal_is_handed_out() -> None:
    session = ClientSession(HELLO)
    assert session.received([b"", encode(Refused("version", "no"))]) == Refused("version", "no")
    assert session.session is None


def test_after_fenced_the_session_is_over() -> None:
    session = connected()
    fenced = [encode(SESSION), encode(Fenced("other"))]
    assert session.received(fenced) == Fenced("other")
    assert session.session is None
    assert session.received(fenced) is None
    assert session.probe(99.0) is None


def test_a_probe_is_due_when_nothing_else_was_sent() -> None:
    session = connected()
    session.frames(1.0, Cancel("a", 1))
    assert session.probe(1.0 + PROBE_INTERVAL / 2) is None
    assert session.probe(1.0 + PROBE_INTERVAL) == [encode(SESSION), b""]
    assert session.probe(1.0 + PROBE_INTERVAL) is None


HOLD = """
import sys
from pathlib import Path
from kvmanager.liveness import HeldLock
lock = HeldLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> "subprocess.Popen[str]":
    """Another process that holds the lock until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_that_is_taken_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a manager that removes the file of a dead process hinders no successor."""
    process = hold(tmp_path / "name")
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        process.communicate()

    monkeypatch.setattr(liveness.time, "sleep", pause)
    HeldLock(tmp_path / "name").release()
    assert len(waits) == 1


def test_only_the_file_of_a_process_that_died_is_discarded(tmp_path: Path) -> None:
    process = hold(tmp_path / "alive")
    for name in ("dead", "moved"):
        (tmp_path / name).touch()
    (tmp_path / "essay").write_text("of another program")
    moved = WatchedLock(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "old")
    (tmp_path / "moved").write_text("another file")
    moved.discard(tmp_path / "moved")
    moved.discard(tmp_path / "moved" / "17")
    moved.close()
    assert held_locks(tmp_path, but="old", tidy=True) == ("alive",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "essay", "moved", "old"]
    process.communicate()


def test_a_lock_file_may_go_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving").touch()
    held = WatchedLock.held

    def just_before(lock: WatchedLock) -> bool:
        (tmp_path / "leaving").unlink()
        return held(lock)

    monkeypatch.setattr(WatchedLock, "held", just_before)
    assert held_locks(tmp_path, but="", tidy=True) == ()


def test_a_lock_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "name"
    process = hold(path)
    watched = WatchedLock(path)
    assert watched.held()
    assert held_locks(tmp_path, but="other") == ("name",)
    assert held_locks(tmp_path, but="name") == ()
    with pytest.raises(PagekeeperError, match="locked by another process"):
        HeldLock(path)
    process.kill()
    process.communicate()
    assert not watched.held()
    assert held_locks(tmp_path, but="other") == ()
    watched.close()


def test_a_client_that_gets_on_touches_its_lock_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, clock = str(tmp_path / "pool"), [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with ManagerClient("", HELLO, directory) as client:
        path = lock_path(directory, "f")
        touched = []
        for now in (10.0, 10.0 + PROBE_INTERVAL / 2, 10.0 + PROBE_INTERVAL):
            clock[0] = now
            os.utime(path, (1.0, 1.0))
            client.show_life()
            touched.append(path.stat().st_mtime > 1.0)
        assert touched == [True, False, True]


def test_a_lock_whose_file_was_removed_no_longer_stands_and_leaves_its_successors_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "name"
    lock = HeldLock(path)
    lock.check()
    path.unlink()
    with pytest.raises(PagekeeperError, match="another process may have taken this one's place"):
        lock.check()
    path.touch()
    assert not lock.stands
    lock.release()
    assert path.exists()


def test_looking_at_a_lock_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.touch()
    watched = WatchedLock(path)
    assert not watched.held()
    process = hold(path)
    assert watched.held()
    process.communicate()
    watched.close()


def test_release_removes_the_file_and_may_be_repeated(tmp_path: Path) -> None:
    lock = HeldLock(tmp_path / "name")
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_replaced_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "name"
    lockf, replaced = liveness.fcntl.lockf, []

    def replace_once(fd: int, flags: int) -> None:
        lockf(fd, flags)
        if len(replaced) < 2:
            path.unlink()
            if replaced:
                path.touch()
            replaced.append(fd)

    monkeypatch.setattr(liveness.fcntl, "lockf", replace_once)
    lock = HeldLock(path)
    assert len(replaced) == 2
    assert path.exists()
    lock.release()


def test_a_lock_that_is_always_replaced_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness.fcntl, "lockf", lambda fd, flags: os.unlink(tmp_path / "name"))
    with pytest.raises(PagekeeperError, match="removed 16 times"):
        HeldLock(tmp_path / "name")


def test_a_lock_file_that_vanishes_while_listed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(path: Path) -> WatchedLock:
        raise FileNotFoundError(path)

    (tmp_path / "name").touch()
    monkeypatch.setattr(liveness, "WatchedLock", vanished)
    assert held_locks(tmp_path, but="") == ()
