"""The runner's settings, and what its process says when they cannot be met."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_runner.config import RunnerConfig
from kvmanager.settings import SettingError, resolve


def test_defaults_are_allowed_and_names_differ_between_processes() -> None:
    config = resolve(RunnerConfig, {}, {})
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (64, 512, 16)
    assert config.full_name.startswith("runner-")
    assert RunnerConfig(name="r1").full_name == "r1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", "15"),
        ("dtype", "int8"),
        ("max_num_seqs", "0"),
        ("connect_seconds", "-1"),
        ("device", "tpu"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"{name.replace('_', '-')}={value!r}"):
        resolve(RunnerConfig, {name: value}, {})


def test_a_step_must_have_room_for_every_running_sequence() -> None:
    with pytest.raises(SettingError, match="max_num_batched_tokens=32"):
        resolve(RunnerConfig, {"max_num_batched_tokens": "32"}, {})


def run_python(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flag", "status", "words"),
    [
        ("--model=", 2, "pagekeeper runner: model='' is not allowed"),
        ("--model=/nowhere/model.gguf", 2, "pagekeeper runner: model /nowhere/model.gguf: found nothing"),
        ("--threads=many", 2, "--threads='many' is not allowed; want a whole number"),
    ],
)
def test_the_process_ends_with_one_line_that_says_why(
    tmp_path: Path, flag: str, status: int, words: str
) -> None:
    done = run_python("-m", "gpu_runner", f"--pool-directory={tmp_path}", flag)
    assert done.returncode == status
    assert words in done.stderr.splitlines()[-1]


def test_the_scheduler_and_the_server_do_not_import_torch() -> None:
    done = run_python("-c", "import sys, gpu_runner.server; print('torch' in sys.modules)")
    assert done.stdout == "False\n"
