"""The measurement of a restart, with few records: the first repeated prompt is a hit, or it fails."""

import pytest

from tests.bench import restart


def test_a_killed_manager_serves_again_warm(capsys: pytest.CaptureFixture[str]) -> None:
    assert restart.main(["--blocks", "200", "--times", "1"]) == 0
    printed = capsys.readouterr().out
    assert "answers again after" in printed
    assert "a repeated prompt runs after" in printed
