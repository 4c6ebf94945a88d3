"""Who is stuck: judged by looks at a file's time, from its second touch on."""

import os
from pathlib import Path

from services.supervisor.heartbeats import Heartbeats


def touch(path: Path, when: int) -> None:
    path.touch()
    os.utime(path, ns=(when, when))


def test_one_that_stops_touching_is_stuck_after_so_many_looks_and_its_successor_is_not(
    tmp_path: Path,
) -> None:
    lock, beats = tmp_path / "lock", Heartbeats(3)
    for when in (1, 2, 3):
        touch(lock, when)
        assert not beats.stuck("runner", 10, lock)
    looks = [beats.stuck("runner", 10, lock) for _ in range(5)]
    assert looks == [False, False, True, False, False]  # said once
    assert not any(beats.stuck("runner", 11, lock) for _ in range(5))  # another process, not yet judged


def test_a_touch_in_time_starts_the_count_again(tmp_path: Path) -> None:
    lock, beats = tmp_path / "lock", Heartbeats(3)
    for when in range(1, 20):
        touch(lock, when)
        assert not any(beats.stuck("runner", 10, lock) for _ in range(3))


def test_before_the_second_touch_nobody_is_judged(tmp_path: Path) -> None:
    lock, beats = tmp_path / "lock", Heartbeats(2)
    assert not any(beats.stuck("runner", 10, lock) for _ in range(9))  # it is still loading
    touch(lock, 1)
    assert not any(beats.stuck("runner", 10, lock) for _ in range(9))


def test_patience_without_end(tmp_path: Path) -> None:
    lock, beats = tmp_path / "lock", Heartbeats(0)
    for when in (1, 2):
        touch(lock, when)
        beats.stuck("runner", 10, lock)
    assert not any(beats.stuck("runner", 10, lock) for _ in range(99))
