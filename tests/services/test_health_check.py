"""Health checks of containers; how they look at running ones is in test_compose.py."""

import os
from pathlib import Path

from services.health_check import runner
from tests.services.test_serve import lock_holder


def test_a_runner_that_makes_no_progress_is_not_well(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "runner-7"
    lock.parent.mkdir()
    environ = {"PAGEKEEPER_POOL_DIRECTORY": str(tmp_path), "PAGEKEEPER_NAME": "runner-7"}
    assert "no lock runner-7* is held" in runner(environ)
    with lock_holder(lock):
        assert runner(environ) == ""
        os.utime(lock, (0, 0))
        assert "runner-7 has made no progress for" in runner(environ)
