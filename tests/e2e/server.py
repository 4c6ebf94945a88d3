"""A served Pagekeeper for tests: real processes under the real supervisor, a temporary pool, a free port."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

START_SECONDS = 180  # kernels may have to be compiled first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll `condition` until it holds; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        pause.wait(0.02)


class Server:
    """`pagekeeper serve` with the given settings (names as in docs/settings.md); use as a context manager."""

    def __init__(self, pool_directory: Path | None = None, **settings: object) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm")
        self.pool_directory = pool_directory or Path(self._temporary.name) / "pool"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = {
            "dtype": "float32",
            "pool_bytes": "256M",
            "checked": True,
            "threads": 1,  # several would wait for each other wherever something else computes
            "host": "127.0.0.1",
            **settings,
        }
        self.output: list[str] = []

    def __enter__(self) -> "Server":
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PAGEKEEPER_")}
        environ.update({f"PAGEKEEPER_{name.upper()}": str(value) for name, value in self.settings.items()})
        environ.update(PAGEKEEPER_PORT=str(self.port), PAGEKEEPER_POOL_DIRECTORY=str(self.pool_directory))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()
        wait_until(self.ready, f"/ready of {self.url}", START_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._temporary.cleanup()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.decode(errors="replace").rstrip())

    def ready(self) -> bool:
        assert self.process.poll() is None, "serve exited:\n" + "\n".join(self.output[-40:])
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM to the supervisor; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError("serve did not stop:\n" + "\n".join(self.output[-40:])) from None
        self._drain.join(5)
        return status

    # --- what the tests look at ------------------------------------------------------------------------

    @functools.cached_property
    def model(self) -> str:
        name: str = httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"]
        return name

    def metrics(self) -> dict[str, float]:
        """Metric name (labels summed) → value."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line and not line.startswith("#"):
                name, value = re.sub(r"\{.*\}", "", line).rsplit(" ", 1)
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def complete(self, prompt: object, **fields: object) -> dict[str, object]:
        """POST /v1/completions; the JSON answer (an assertion on the status)."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        result: dict[str, object] = answer.json()
        return result

    def text(self, prompt: object, **fields: object) -> str:
        text: str = self.complete(prompt, **fields)["choices"][0]["text"]  # type: ignore[index]
        return text

    def stream(self, prompt: object, **fields: object) -> list[dict[str, object]]:
        """POST /v1/completions with SSE; the list of chunks, after checking that it ends with [DONE]."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]

    def children(self, kind: str) -> list[int]:
        """Process ids of the supervisor's children whose command line names `kind` (a module)."""
        import psutil

        def names(child: psutil.Process) -> bool:
            try:
                return kind in child.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it died while we looked
                return False

        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in found if names(child)]
