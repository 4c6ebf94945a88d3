"""The command line: help, wrong usage, and what each command turns into."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services import cli
from services.text.model_files import ModelError


def run(*argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PAGEKEEPER_")}
    command = [sys.executable, "-m", "services.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**kept, **environ})


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str) -> None:
    answer = run(command, "--help")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("usage: ")
    assert command in run("--help").stdout


@pytest.mark.parametrize("argv", [(), ("server",), ("--port=1",)])
def test_an_unknown_command_is_answered_with_the_known_ones(argv: tuple[str, ...]) -> None:
    answer = run(*argv)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "serve, kvmanager, runner, frontend, chat" in answer.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [("serve", "port"), ("frontend", "port"), ("kvmanager", "watermark"), ("runner", "max-num-seqs")],
)
def test_a_wrong_setting_is_refused_with_name_value_and_what_is_allowed(command: str, name: str) -> None:
    answer = run(command, f"--{name}=-3")
    assert answer.returncode == 2
    assert f"--{name}='-3' is not allowed; want" in answer.stderr
    variable = "PAGEKEEPER_" + name.upper().replace("-", "_")
    answer = run(command, **{variable: "much"})
    assert answer.returncode == 2
    assert f"{variable}='much' is not allowed; want" in answer.stderr


def test_an_unknown_option_is_refused() -> None:
    answer = run("serve", "--prot=1")
    assert answer.returncode == 2
    assert "--prot" in answer.stderr


@pytest.mark.parametrize("command", ["serve", "runner", "frontend"])
def test_a_missing_model_is_one_clear_line(command: str) -> None:
    answer = run(command, "--model=/nonexistent/model")
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"pagekeeper {command}: no model at '/nonexistent/model'")
    assert answer.stderr.count("\n") == 1


def test_model_becomes_a_path_and_other_options_pass(tmp_path: Path) -> None:
    given = cli.process_argv("runner", ["--dtype=float32", "--model", str(tmp_path), "--threads=1"], {})
    assert given == [
        sys.executable,
        "-m",
        "gpu_runner",
        "--dtype=float32",
        "--threads=1",
        f"--model={tmp_path}",
    ]
    environ = {"PAGEKEEPER_MODEL": str(tmp_path)}
    assert cli.process_argv("frontend", [], environ)[-1] == f"--model={tmp_path}"
    assert cli.process_argv("frontend", [], {})[-1].endswith(".gguf")
    assert cli.process_argv("kvmanager", ["--watermark=0.1"], environ)[1:] == [
        "-m",
        "kvmanager",
        "--watermark=0.1",
    ]


def test_process_argv_refuses_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="nonexistent"):
        cli.process_argv("runner", ["--model=/nonexistent"], {})
