"""`make bench`: starts a server of its own and measures what a client sees: speed, latency, memory.

Options go through make as BENCH="…": --requests N measures memory growth over N short requests instead;
--set NAME=VALUE gives the server a setting (docs/settings.md); --json PATH says where the figures go.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_runner.weights import open_source
from services.text import model_source
from tests.bench.load_client import run
from tests.bench.memory import Peaks, served
from tests.bench.report import fastest, figures, forms_table, memory_table, speed_table
from tests.bench.workloads import Workload, fixed, standard
from tests.e2e.server import Server

LIMIT_SECONDS = 300  # for one measurement of the matrix products
GROWTH_STREAMS = 32
GROWTH_LENGTHS = (48, 16)  # tokens in, tokens out


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(name: str) -> Any:
    """A progress callback that writes a line about every two seconds."""
    began = last = time.perf_counter()

    def progress(done: int, tokens: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > 2:
            last = now
            say(f"   {name}: {done} requests, {tokens} tokens, {tokens / (now - began):.0f} tokens/s")

    return progress


def matrix_products(model: str, dtype: str) -> dict[str, Any]:
    """The times of `tests.bench.matrix_limit`, in a process of its own."""
    say("-- matrix products alone (the server is idle)")
    command = [sys.executable, "-m", "tests.bench.matrix_limit", model, dtype]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_SECONDS)
    limits: dict[str, Any] = json.loads(answer.stdout)
    return limits


def faster(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two measurements, the shorter time of each product."""
    forms = {
        name: {kind: min(times[kind], other["forms"][name][kind]) for kind in times}
        for name, times in one["forms"].items()
    }
    return {**one, "forms": forms}


async def measure(server: Server, workloads: list[Workload]) -> tuple[list[Any], dict[str, int]]:
    """The runs of all workloads, and the peak memory of each process in bytes."""
    peaks = Peaks(served(server.process.pid))
    runs = []
    for workload in workloads:
        say(f"-- {workload.name}: {len(workload.asks)} requests")
        runs.append(await run("127.0.0.1", server.port, server.model, workload, show(workload.name)))
    await peaks.stop()
    return runs, peaks.peaks


def speed(server: Server, model: str, dtype: str) -> tuple[str, dict[str, Any]]:
    """The published figures: a page of Markdown, and the same as data."""
    vocab_size = open_source(model).config.vocab_size
    before = matrix_products(model, dtype)
    warm_up = fixed("warm-up", 32, 32, (128, 32), vocab_size)
    runs, peaks = asyncio.run(measure(server, [warm_up, *standard(vocab_size)]))
    limits = faster(before, matrix_products(model, dtype))
    rows = [figures(each, fastest(limits["forms"])) for each in runs[1:]]
    page = "\n\n".join([speed_table(rows), memory_table(peaks), forms_table(limits)])
    data = {"speed": [dataclasses.asdict(row) for row in rows], "peak_bytes": peaks, "limits": limits}
    return page, data


async def growth_samples(server: Server, vocab_size: int, requests: int) -> list[dict[str, int]]:
    """Memory of each process after each tenth of the requests."""
    peaks = Peaks(served(server.process.pid))
    samples = []
    for part in range(10):
        name = f"part {part + 1} of 10"
        workload = fixed(name, GROWTH_STREAMS, requests // 10, GROWTH_LENGTHS, vocab_size)
        await run("127.0.0.1", server.port, server.model, workload, show(name))
        peaks.look()
        samples.append(dict(peaks.now))
        say(f"-- {name}: " + ", ".join(f"{key} {size / 1e6:.1f} MB" for key, size in peaks.now.items()))
    await peaks.stop()
    return samples


def growth(server: Server, model: str, requests: int) -> tuple[str, dict[str, Any]]:
    """Memory from the third tenth of the requests on (by then every buffer is made) to the last."""
    vocab_size = open_source(model).config.vocab_size
    samples = asyncio.run(growth_samples(server, vocab_size, requests))
    lines = [f"| process | after {3 * requests // 10} requests, MB | after {requests}, MB |", "|---|---|---|"]
    lines += [
        f"| {key} | {samples[2][key] / 1e6:.1f} | {samples[-1][key] / 1e6:.1f} |" for key in samples[-1]
    ]
    return "\n".join(lines), {"growth_bytes": samples}


def machine() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=0, help="measure memory growth over this many requests"
    )
    parser.add_argument("--model", default="", help="as MODEL of make serve")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server"
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go")
    given = parser.parse_args()
    model = str(model_source.resolve(given.model))
    settings = {"dtype": "auto", "pool_bytes": "1G", "checked": "false", "threads": "0"}
    settings.update(item.split("=", 1) for item in given.set)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped, too
    say("-- starting the server")
    with Server(model=model, **settings) as server:
        if given.requests:
            page, data = growth(server, model, given.requests)
        else:
            page, data = speed(server, model, settings["dtype"])
    data["machine"], data["model"], data["settings"] = machine(), Path(model).name, settings
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(data, indent=1))
    print(f"{data['model']} on {data['machine']}\n\n{page}")
    say(f"-- also in {given.json}")


if __name__ == "__main__":
    main()
