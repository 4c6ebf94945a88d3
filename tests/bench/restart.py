"""`python -m tests.bench.restart`: how soon the KV manager serves again after it was killed.

A pool with many sealed blocks; the manager is killed and started again, and a frontend and a runner wait for
it. Measured from the start of the process: until it answers a Hello, and until a repeated prompt has started
with its cached tokens.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvmanager import pool_directory
from kvmanager.client import ManagerClient
from kvmanager.paths import prepare
from kvmanager.pool.block_pool import NO_OWNER, SEALED, BlockRecord
from kvmanager.pool.hashing import NO_SALT, block_hash, root_hash, token_array
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Choice,
    Directives,
    FrontendHello,
    Layout,
    Ready,
    RunnerHello,
    SamplingParams,
    Submit,
)

LAYOUT = Layout("restart", "float32", 16, 1, 1, 1)
CHAIN = 50  # blocks that follow each other
WAIT = 60.0  # seconds


def prompt(number: int) -> list[int]:
    """The text of one chain, and a token more; no two have a block in common."""
    first = number * CHAIN * LAYOUT.block_size
    return list(range(first, first + CHAIN * LAYOUT.block_size + 1))


def fill(directory: str, num_blocks: int) -> None:
    """A pool in which every block is sealed."""
    prepare(directory)
    pool_directory.create(directory, LAYOUT, num_blocks * LAYOUT.block_bytes)
    records, size = pool_directory.open_records(directory, LAYOUT), LAYOUT.block_size
    for number in range(num_blocks // CHAIN):
        parent, tokens = root_hash(LAYOUT), token_array(prompt(number))
        for index in range(CHAIN):
            packed = tokens[index * size : (index + 1) * size].tobytes()
            digest = block_hash(parent, packed, NO_SALT)
            record = BlockRecord(SEALED, 1, NO_OWNER, digest, parent, NO_SALT, packed, float(number))
            records.write(number * CHAIN + index, record)
            parent = digest
    records.close()


def start(directory: str, num_blocks: int) -> "subprocess.Popen[bytes]":
    size = num_blocks * LAYOUT.block_bytes
    command = [sys.executable, "-m", "kvmanager", f"--pool-directory={directory}", f"--pool-bytes={size}"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def next_start(runner: ManagerClient) -> Any:
    """The first start that comes."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        runner.socket.poll(5)
        for message in runner.receive():
            if isinstance(message, Directives) and message.starts:
                return message.starts[0]
    raise AssertionError(f"no start within {WAIT} s")


def measure(directory: str, num_blocks: int, chain: int) -> tuple[float, float]:
    """Seconds from the manager's start to its first answer, and to the start of a repeated prompt."""
    hello = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc:///nowhere")
    greeting = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, 8, 1 << 20)
    with ManagerClient("", hello, directory) as frontend, ManagerClient("", greeting, directory) as runner:
        began = time.monotonic()
        manager = start(directory, num_blocks)
        try:
            frontend.connect(WAIT)
            answered = time.monotonic() - began
            runner.connect(WAIT)
            runner.send(Ready())
            sampling = SamplingParams(8, 0)
            frontend.send(Submit("r", 0, time.monotonic(), tuple(prompt(chain)), (Choice(0),), sampling))
            cached = next_start(runner).sequences[0].num_cached_tokens
            started = time.monotonic() - began
            assert cached == CHAIN * LAYOUT.block_size, f"{cached} tokens were cached"
        finally:
            manager.send_signal(signal.SIGKILL)
            manager.wait()
    return answered, started


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restart", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000, help="sealed blocks in the pool")
    parser.add_argument("--times", type=int, default=5, help="how often the manager is killed")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/dev/shm") as folder:
        directory = os.path.join(folder, "pool")
        fill(directory, options.blocks)
        last = options.blocks // CHAIN - 1  # the newest ones: each start evicts a block of the oldest
        found = [measure(directory, options.blocks, last - number) for number in range(options.times)]
    for name, times in zip(
        ("answers again", "a repeated prompt runs"), zip(*found, strict=True), strict=True
    ):
        print(f"{name} after {median(times):.2f} s (p50), {max(times):.2f} s (max), {options.blocks} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
