"""A resumable stream with the real model: its client goes away and comes back, and every frontend dies."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx

from tests.e2e.server import Server, wait_until

PROMPT = "The history of the city begins"
ASK: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True, "temperature": 0.9, "seed": 5}


def events(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """(number, data) of each event."""
    number = 0
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, line[6:]


def test_a_stream_outlives_its_client_and_all_frontends() -> None:
    with Server(frontends=2) as server:
        undisturbed = server.text(PROMPT, **ASK)
        body = {"prompt": PROMPT, "stream": True, "stream_options": {"resumable": True}, **ASK}
        taken: list[tuple[int, str]] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            stream_id = answer.headers["x-stream-id"]
            taken += itertools.islice(events(answer.iter_lines()), 3)
        url = f"{server.url}/v1/streams/{stream_id}"
        for kill in (True, False):
            headers = {"last-event-id": str(len(taken))}
            with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
                assert answer.status_code == 200, answer.read()
                found = events(answer.iter_lines())
                taken += itertools.islice(found, 3) if kill else found
            if kill:
                for process in server.children("services"):
                    os.kill(process, signal.SIGKILL)
                wait_until(server.ready, "a new frontend", 60)
        assert [number for number, _ in taken] == list(range(1, len(taken) + 1))
        assert taken.pop()[1] == "[DONE]"
        chunks = [json.loads(data) for _, data in taken]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == undisturbed
        wait_until(lambda: server.metrics()["pagekeeper_used_blocks"] == 0, "no block leaked")
