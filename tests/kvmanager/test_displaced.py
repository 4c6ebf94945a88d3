"""A process that lives but whose lock file was removed: another may have its name, and it ends."""

from pathlib import Path

import pytest

from kvmanager.errors import PagekeeperError
from kvmanager.paths import lock_path, manager_endpoint
from kvmanager.protocol import Directives, Fenced, Progress, RunnerLost, StepReport
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.test_server import DEADLINE, Daemon, stats_when, wait_for
from tests.kvmanager.test_server import daemon as daemon


def test_a_runner_whose_place_was_taken_while_it_lives_is_fenced_and_its_blocks_wait_for_its_death(
    daemon: Daemon,
) -> None:
    with daemon.frontend() as frontend:
        first = daemon.runner()
        frontend.send(submission("a", [1] * 9))
        start = wait_for(first, Directives).starts[0]
        lock_path(daemon.directory, "runner").unlink()  # somebody tidies up
        with daemon.runner() as second:
            assert wait_for(frontend, RunnerLost).requests == (("a", 0),)
            second.send(StepReport())  # it has used its session: the same process would have let go
            stats = stats_when(frontend, lambda stats: len(stats.runners) == 1 and stats.runners[0].ready)
            assert stats.pool.quarantined == 3
            first.send(StepReport(progress=(Progress(start.start_id, 0, (), 9),)))
            wait_for(first, Fenced)
            with pytest.raises(PagekeeperError, match="another process may have taken this one's place"):
                first.connect(DEADLINE)
            assert stats_when(frontend, lambda stats: True).pool.quarantined == 3
            first.close()
            stats_when(frontend, lambda stats: stats.pool.quarantined == 0)
            assert lock_path(daemon.directory, "runner").exists()


def test_a_manager_whose_place_was_taken_ends_with_one_line(daemon: Daemon) -> None:
    daemon.frontend().close()
    lock_path(daemon.directory, "manager").unlink()
    assert daemon.process is not None
    _, errors = daemon.process.communicate(timeout=DEADLINE)
    assert daemon.process.returncode == 1
    assert "kvmanager: the lock file" in errors.splitlines()[-1]


def test_a_manager_whose_socket_was_removed_ends_with_one_line(daemon: Daemon) -> None:
    daemon.frontend().close()
    Path(manager_endpoint(daemon.directory).removeprefix("ipc://")).unlink()
    assert daemon.process is not None
    _, errors = daemon.process.communicate(timeout=DEADLINE)
    assert daemon.process.returncode == 1
    assert "manager.sock was removed" in errors.splitlines()[-1]
