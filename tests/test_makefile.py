"""`make serve`'s variables, and what it says on a machine that cannot run it."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def make(*argv: str) -> "subprocess.CompletedProcess[str]":
    """`make` as typed in a fresh shell: nothing comes from a make that runs the tests, or from its user."""
    command = ["make", "--no-print-directory", "-C", str(ROOT), *argv]
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_variables_become_flags(tmp_path: Path) -> None:
    given = [
        "PORT=9000",
        "HOST=0.0.0.0",
        "RUNNERS=2",
        "FRONTENDS=3",
        "POOL=2G",
        "MODEL=/a b/c",
        "RESET_POOL=1",
    ]
    planned = make("-n", "serve", f"VENV={tmp_path}", *given).stdout.splitlines()[-1]
    for flag in ("--host=0.0.0.0", "--port=9000", "--runners=2", "--frontends=3", "--model='/a b/c'"):
        assert flag in planned
    assert "--pool-bytes=2G" in planned
    assert "--reset-pool=1" in planned


def test_without_variables_there_are_no_flags(tmp_path: Path) -> None:
    planned = make("-n", "serve", f"VENV={tmp_path}").stdout.splitlines()[-1]
    assert planned.split() == ["exec", f"{tmp_path}/bin/pagekeeper", "serve"]


def test_every_test_is_run_and_the_longest_first(tmp_path: Path) -> None:
    planned = make("-n", "test", f"VENV={tmp_path}").stdout
    named = [word.rstrip("/") for word in planned.split() if word.startswith("tests/")]
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(named) == folders - {"tests"} | {"tests/test_*.py"}
    assert named[:3] == ["tests/kvmanager", "tests/sim", "tests/e2e"]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("[ $1 = --version ] && echo Python 3.9.1 || exit 1", "3.11 or newer is needed, and Python 3.9.1"),
        ('case "$*" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(tmp_path: Path, program: str, message: str) -> None:
    answer = make("serve", f"VENV={tmp_path / 'venv'}", f"PYTHON={script(tmp_path, program)}")
    assert answer.returncode != 0
    assert message in answer.stdout
    assert not (tmp_path / "venv").exists()


def test_ci_runs_what_a_person_runs() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_programs_that_are_missing_are_named() -> None:
    planned = make("programs", "PROGRAMS=sh")
    assert (planned.returncode, planned.stdout) == (0, "")
    planned = make("-n", "programs")
    assert "chromium redis-server" in planned.stdout
    assert "sudo apt-get install$missing" in planned.stdout
