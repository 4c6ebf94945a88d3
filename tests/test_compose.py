"""compose.yaml and the Dockerfile: what they promise, and their very commands and health checks as processes.

No Docker engine is needed: the volume becomes a folder of /dev/shm, the image's `pagekeeper` that of this
environment.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import free_port, wait_until
from tests.image import OURS, ROOT, copy, ignored, read_compose, read_dockerfile

IMAGE = read_dockerfile()


def services(**variables: str) -> dict[str, Any]:
    found: dict[str, Any] = read_compose(**variables)["services"]
    return found


def test_the_services_are_those_promised() -> None:
    assert set(services()) == {*OURS, "runner-gpu", "balancer", "redis"}
    assert services()["runner-gpu"]["profiles"] == ["gpu"]
    assert all("profiles" not in service for name, service in services().items() if name != "runner-gpu")


def test_only_the_balancer_is_reachable_from_outside() -> None:
    published = {
        name: service["ports"] for name, service in services(PORT="9000").items() if "ports" in service
    }
    assert published == {"balancer": ["9000:8000"]}


def test_nothing_runs_as_root_and_everything_has_a_health_check() -> None:
    assert IMAGE.user == "pagekeeper"
    for name, service in services().items():
        assert service["user"] not in ("", "root", "0"), name
        assert service["healthcheck"]["test"][0] == "CMD", name
    for name in OURS:
        assert services()[name]["cap_drop"] == ["ALL"]


def test_the_pool_is_shared_memory_of_the_images_user_and_larger_than_the_blocks() -> None:
    options = read_compose()["volumes"]["pool"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "uid=10001,gid=10001,mode=0700" in options["o"]
    assert "size=1280m" in options["o"]
    assert services()["kvmanager"]["environment"]["PAGEKEEPER_POOL_BYTES"] == "1G"
    for name in OURS:
        assert services()[name]["user"] == "10001:10001"
        assert "pool:/pool" in services()[name]["volumes"]
        assert services()[name]["environment"]["PAGEKEEPER_POOL_DIRECTORY"].startswith("/pool/")


def test_frontends_keep_streams_in_redis() -> None:
    assert services()["frontend"]["environment"]["REDIS_URL"] == "redis://redis:6379/0"
    assert services()["redis"]["command"][0] == "redis-server"


def test_replicas_can_be_chosen() -> None:
    chosen = services(RUNNERS="3", FRONTENDS="4")
    assert [chosen[name]["deploy"]["replicas"] for name in ("runner", "frontend")] == ["3", "4"]


def test_the_balancer_asks_the_frontends_where_they_are() -> None:
    lines = [line.split("#")[0].split() for line in (ROOT / "compose/haproxy.cfg").read_text().splitlines()]
    port = services()["frontend"]["environment"]["PAGEKEEPER_PORT"]
    (template,) = (words for words in lines if words[:1] == ["server-template"])
    assert template[3] == f"frontend:{port}"
    assert ["option", "httpchk", "GET", "/ready"] in lines
    assert ["option", "abortonclose"] in lines
    assert ["bind", ":8000"] in lines
    assert services()["balancer"]["volumes"] == [
        "./compose/haproxy.cfg:/usr/local/etc/haproxy/haproxy.cfg:ro"
    ]


def modules(package: Path) -> set[Path]:
    return {path.relative_to(package) for path in package.rglob("*.py")}


def test_what_the_image_copies_is_there_and_makes_a_whole_package(tmp_path: Path) -> None:
    for word, rest in IMAGE.steps:
        if word == "COPY" and not rest.startswith("--from"):
            *names, target = rest.split()
            assert not any(ignored(name) for name in names)
            for name in names:
                copy(ROOT / name, tmp_path / target)
    assert ignored(".git")
    assert ignored(".venv")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, f"--target={tmp_path / 'site'}", str(tmp_path)], check=True, timeout=120)
    for package in ("services", "kvmanager", "gpu_runner", "kernels"):
        assert modules(tmp_path / "site" / package) == modules(ROOT / package)
    assert (tmp_path / "site/bin/pagekeeper").exists()


class Containers:
    """The services of compose.yaml as processes: all as written, but for one port and one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_port())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        program = shutil.which("pagekeeper", path=str(Path(sys.executable).parent))
        assert program, "pagekeeper is not installed in this environment: pip install -e ."
        self.program = {"pagekeeper": program, "python": sys.executable}

    def environ(self, name: str) -> dict[str, str]:
        outer = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        inner = {**IMAGE.environ, **services(POOL_BYTES="64M")[name]["environment"]}
        inner.pop("PATH", None)
        exchanged = {key: value.replace("/pool", str(self.folder)) for key, value in inner.items()}
        if "PAGEKEEPER_PORT" in exchanged:
            exchanged["PAGEKEEPER_PORT"] = self.port
        return {**outer, **exchanged}

    def start(self, name: str) -> None:
        command = [*IMAGE.entrypoint, *services()[name]["command"]]
        log = (self.folder.parent / f"{name}.log").open("wb")
        self.processes[name] = subprocess.Popen(
            [self.program[command[0]], *command[1:]], env=self.environ(name), stdout=log, stderr=log
        )

    def log(self, name: str) -> str:
        return (self.folder.parent / f"{name}.log").read_text(errors="replace")

    def healthy(self, name: str) -> bool:
        assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)}"
        return self.check(name).returncode == 0

    def check(self, name: str) -> "subprocess.CompletedProcess[str]":
        """The health check as it is written."""
        command = services()[name]["healthcheck"]["test"][1:]
        return subprocess.run(
            [self.program[command[0]], *command[1:]],
            env=self.environ(name),
            capture_output=True,
            text=True,
            timeout=30,
        )

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def containers() -> Iterator[Containers]:
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as folder:
        pool = Path(folder) / "pool"
        pool.mkdir(mode=0o700)
        made = Containers(pool)
        yield made
        made.stop()


def test_commands_settings_and_health_checks_work_as_written(containers: Containers) -> None:
    for name in OURS:
        sick = containers.check(name)
        assert sick.returncode == 1, f"{name} is said to be well before it runs"
        assert sick.stderr.startswith(f"{name}: ")
    for name in OURS:
        containers.start(name)
    for name in OURS:
        wait_until(lambda name=name: containers.healthy(name), f"{name} healthy", 180)
    url = f"http://127.0.0.1:{containers.port}"
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    body = {"model": model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    for name in reversed(OURS):  # SIGTERM, as Docker sends it
        containers.processes[name].send_signal(signal.SIGTERM)
        assert containers.processes[name].wait(40) == 0, containers.log(name)
        assert containers.check(name).returncode == 1
    assert [path for path in containers.folder.rglob("*") if path.is_socket()] == []
