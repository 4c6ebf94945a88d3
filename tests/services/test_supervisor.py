"""The supervisor with real processes: small Python programs in the place of manager, runner and frontend."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.supervisor.processes import Command, Supervisor
from services.supervisor.supervision import Child, Policy
from tests.e2e.server import wait_until

QUICK = Policy(first_delay=0.01, longest_delay=0.05, healthy_after=30.0, quick_failures=2, grace=0.3)
LOYAL = """
import signal, sys, threading
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("up", flush=True)
stop.wait(60)
print("down", flush=True)
"""
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
threading.Event().wait(60)
"""


def command(name: str, program: str, stage: int = 0, **environ: str) -> Command:
    base = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return Command(Child(name, stage), (sys.executable, "-c", program), {**base, **environ}, {"FIRST": "yes"})


class Told:
    """Collects what the supervisor says, and calls `react(name, line)` for each line."""

    def __init__(self, react: Callable[[str, str], None] = lambda name, line: None) -> None:
        self.lines: list[tuple[str, str]] = []
        self._react = react

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._react(name, line)

    def of(self, name: str) -> list[str]:
        return [line for teller, line in self.lines if teller == name]


def run(
    commands: list[Command],
    told: Told,
    then: Callable[[Supervisor], None] | None = None,
    stuck_seconds: float = 0.0,
) -> int:
    async def main() -> int:
        supervisor = Supervisor(commands, QUICK, told, stuck_seconds)
        if then is not None:
            then(supervisor)
        return await supervisor.run()

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_all_start_and_a_signal_stops_them_stage_by_stage() -> None:
    def react(name: str, line: str) -> None:
        if line == "up" and len([1 for _, told_line in told.lines if told_line == "up"]) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    told = Told(react)
    names = ["manager", "runner", "frontend"]
    status = run([command(name, LOYAL, 2 - stage) for stage, name in enumerate(names)], told)
    assert status == 0
    assert [name for name, line in told.lines if line == "down"] == ["frontend", "runner", "manager"]
    assert psutil.Process().children() == []


def test_a_killed_child_is_started_again_without_its_first_settings() -> None:
    program = "import os; print(os.environ.get('FIRST', 'no'), os.environ['KIND'], os.getpid())" + LOYAL
    lives: list[int] = []

    def react(name: str, line: str) -> None:
        if line[:3] in ("yes", "no "):
            lives.append(int(line.split()[-1]))
        elif line == "up":
            os.kill(
                lives[-1] if len(lives) == 1 else os.getpid(),
                signal.SIGKILL if len(lives) == 1 else signal.SIGINT,
            )

    told = Told(react)
    assert run([command("runner", program, KIND="test")], told) == 0
    assert [line.split()[:2] for line in told.of("runner") if "test" in line] == [
        ["yes", "test"],
        ["no", "test"],
    ]
    assert any("ended by SIGKILL" in line for line in told.of("runner"))


def test_one_that_lives_without_progress_is_killed_and_started_again(tmp_path: Path) -> None:
    def react(name: str, line: str) -> None:
        if "SIGKILL" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    program = f"""
import os, threading
for turn in range(3):
    path = {str(tmp_path)!r} + f"/lock-{{os.getpid()}}"
    open(path, "w").close()
    os.utime(path, (turn, turn))
    threading.Event().wait(1.2)
threading.Event().wait(60)
"""
    told = Told(react)
    child = dataclasses.replace(command("runner", program), lock=f"{tmp_path}/lock-{{pid}}")
    assert run([child], told, stuck_seconds=1.5) == 0
    first, second = told.of("runner")[:2]
    assert first == "has made no progress for 1.5 s: killed"
    assert "was ended by SIGKILL" in second


def test_one_that_always_fails_ends_all_and_its_last_words_are_shown() -> None:
    told = Told()
    commands = [command("manager", LOYAL, 1), command("runner", "raise SystemExit('no such model')")]
    assert run(commands, told) == 1
    assert told.of("runner").count("no such model") == QUICK.quick_failures + 1 + 3
    assert any("runner failed" in line for line in told.of("supervisor"))
    assert psutil.Process().children() == []


def test_wrong_settings_are_not_tried_again() -> None:
    told = Told()
    program = "import sys; print('--port=x is not allowed'); sys.exit(2)"
    assert run([command("manager", LOYAL, 1), command("frontend", program)], told) == 2
    assert told.of("frontend").count("--port=x is not allowed") == 2  # as it came, and at the end


def test_a_program_that_cannot_be_started_is_named() -> None:
    told = Told()
    missing = Command(Child("runner", 0), ("/nonexistent/python",), {}, {})
    assert run([missing], told) == 1
    assert any("cannot be started" in line and "/nonexistent/python" in line for line in told.of("runner"))


def test_one_that_ignores_a_stop_is_killed() -> None:
    told = Told(lambda name, line: os.kill(os.getpid(), signal.SIGTERM) if line == "up" else None)
    assert run([command("runner", STUBBORN)], told) == 0
    assert psutil.Process().children() == []


def test_a_second_stop_does_not_wait() -> None:
    def react(name: str, line: str) -> None:
        if line == "up" or line.startswith("stopping;"):
            os.kill(os.getpid(), signal.SIGINT)

    patient = Command(Child("runner", 0, drain=3600.0), command("", STUBBORN).argv, dict(os.environ), {})
    told = Told(react)
    assert run([patient], told) == 0
    assert "stopping at once" in told.of("supervisor")


def test_output_without_line_ends_and_broken_text_pass() -> None:
    program = r"import os; os.write(1, b'x' * 200000 + b'\n\xff tail')"
    told = Told(lambda name, line: os.kill(os.getpid(), signal.SIGTERM) if line.endswith("tail") else None)
    run([command("runner", program)], told)
    assert "".join(line for line in told.of("runner") if set(line) == {"x"}).startswith("x" * 200000)
    assert "\ufffd tail" in told.of("runner")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_children_die_with_a_killed_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        from services.supervisor.supervision import Child
        from services.supervisor.processes import Command, Supervisor
        stubborn = Command(Child("runner", 0), (sys.executable, "-c", {STUBBORN!r}), {{}}, {{}})
        asyncio.run(Supervisor([stubborn]).run())
        """
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline().split() == ["runner", "|", "up"]
    (child,) = psutil.Process(supervisor.pid).children()
    assert os.getsid(child.pid) == child.pid  # so that Ctrl-C in the terminal does not reach it
    supervisor.send_signal(number)
    supervisor.wait(10)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child's end")
