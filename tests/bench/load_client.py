"""A load client that takes little of the processor that the server runs on: plain sockets, little JSON.

Each request is a streamed `/v1/completions` of token ids on a connection of its own. The times of a request
are those at which its events arrive; its token counts are the server's, from the usage event.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.bench.workloads import Ask, Workload

REQUEST_SECONDS = 600.0  # after which a request counts as failed


@dataclass
class Outcome:
    """One answered request; times in seconds of `time.perf_counter`."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Run:
    """A workload's outcomes and its whole time in seconds."""

    workload: Workload
    seconds: float
    outcomes: tuple[Outcome, ...]


def request_bytes(host: str, port: int, model: str, ask: Ask) -> bytes:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    return head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def parsed(event: bytes) -> dict[str, Any]:
    """The JSON of one event; the line before it may be HTTP's chunk size."""
    found: dict[str, Any] = json.loads(event[event.index(b"data: ") + 6 :])
    return found


async def stream(host: str, port: int, model: str, ask: Ask) -> Outcome:
    """One request to its end. Raises RuntimeError for any answer but the tokens that were asked for."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    outcome = Outcome(time.perf_counter())
    try:
        writer.write(request_bytes(host, port, model, ask))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"{head.decode()}{(await reader.read(4096)).decode()}")
        usage: dict[str, Any] = {}
        while b"data: [DONE]" not in (event := await reader.readuntil(b"\n\n")):
            if b'"usage":{' in event:
                usage = parsed(event)["usage"]
            elif b"data: " in event and b'"text":""' not in event:
                outcome.token_times.append(time.perf_counter())
    finally:
        writer.close()
    outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    if outcome.output_tokens != ask.output_tokens or not outcome.token_times:
        raise RuntimeError(f"wanted {ask.output_tokens} tokens, got {outcome.output_tokens}")
    return outcome


async def run(
    host: str, port: int, model: str, workload: Workload, progress: Callable[[int, int], None]
) -> Run:
    """All requests of the workload, `streams` at a time; `progress(done, tokens)` after each."""
    waiting = iter(workload.asks)
    outcomes: list[Outcome] = []
    total = 0

    async def one_stream() -> None:
        nonlocal total
        for ask in waiting:
            async with asyncio.timeout(REQUEST_SECONDS):
                outcome = await stream(host, port, model, ask)
            outcomes.append(outcome)
            total += outcome.output_tokens
            progress(len(outcomes), total)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workload.streams):
            group.create_task(one_stream())
    return Run(workload, time.perf_counter() - began, tuple(outcomes))
