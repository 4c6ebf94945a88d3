"""SIGKILL of the frontend that runs a stream: the next one that is asked goes on with it, to the letter."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.supervisor.serve import sweep
from services.text.model_source import resolve
from tests.services.fake_stack import Stack, says, wait_until
from tests.services.redis_server import RedisServer
from tests.services.test_streams import parse, text_of

TEXT = "Hi 👋🏽 there, 👩‍👩‍👧 and 🇫🇷! Ça va? 你好。 Don't STOP, ST"
BODY: dict[str, Any] = {
    "prompt": "Hello",
    "max_tokens": 100,
    "n": 2,
    "seed": 7,
    "stop": ["STOP!", "ST."],
    "stream": True,
    "return_token_ids": True,
    "logprobs": 1,
    "stream_options": {"resumable": True, "include_usage": True},
}


class Process:
    """`python -m services` on the stack's pool directory."""

    def __init__(self, stack: Stack, redis_url: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PAGEKEEPER_")}
        argv = [f"--port={port}", f"--pool-directory={stack.pool_directory}", f"--model={resolve('')}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services", *argv],
            env={**environ, "REDIS_URL": redis_url},
            stderr=subprocess.DEVNULL,
        )

    @property
    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait(20)


@pytest.fixture(scope="module", params=["files", "redis"])
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "files":
        yield ""
        return
    with RedisServer() as redis:
        yield redis.url


def ask(url: str, stream_id: str, after: int) -> contextlib.AbstractContextManager[httpx.Response]:
    """The request itself, or what continues it."""
    if not stream_id:
        return httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20)
    headers = {"last-event-id": str(after)}
    return httpx.stream("GET", f"{url}/v1/streams/{stream_id}", headers=headers, timeout=20)


def summary(events: list[Any]) -> list[Any]:
    """What the chunks say together, whatever their sizes."""
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    result: list[Any] = [[], [], chunks[-1]["usage"]]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        result[choice["index"]] += choice["token_ids"]
        result[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return [*result, text_of(events, 0), text_of(events, 1)]


def test_a_killed_frontend_costs_no_token(redis_url: str) -> None:
    with Stack(frontends=0) as stack:
        manager = stack.manager
        manager.script = says(TEXT, TEXT[::-1])
        processes = [Process(stack, redis_url) for _ in range(3)]
        try:
            wait_until(lambda: all(process.ready for process in processes), "the frontends", 90)
            whole = httpx.post(f"{processes[0].url}/v1/completions", json=BODY, timeout=20)
            undisturbed = summary(list(parse(iter(whole.text.split("\n")))))
            assert undisturbed[3:] == [TEXT, TEXT[::-1]]

            taken: list[Any] = []
            manager.hold_attempts = 9
            stream_id = ""
            for process, hold_at in zip(processes, (5, 12, None), strict=True):
                manager.hold_at = hold_at
                stack.go_on()
                with ask(process.url, stream_id, len(taken)) as answer:
                    assert answer.status_code == 200
                    events = parse(answer.iter_lines())
                    if hold_at is None:
                        taken += events
                    else:
                        stream_id = answer.headers["x-stream-id"]
                        wait_until(lambda: not manager.flow.is_set(), "the hold")
                        taken.append(next(events))
                        process.kill()
                        stack.do(manager.lose_runner)  # what it ran is cancelled
        finally:
            for process in processes:
                process.kill()
            sweep(stack.pool_directory)
    assert [number for number, _ in taken] == list(range(1, len(taken) + 1))
    assert taken[-1][1] == "[DONE]"
    assert summary(taken) == undisturbed
    given = [sum(len(c.output_token_ids) for c in submit.choices) for submit in manager.submits[-3:]]
    assert given[0] == 0
    assert 0 < given[1] <= given[2], "it goes on from what was shown"
