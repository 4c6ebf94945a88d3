"""How long each question holds up the manager, at its longest: a pool of 100,000 blocks, half of it in use by
64 long sequences, the other half cached.

    python -m tests.bench.bench_introspection [--blocks 100000]

What counts is one message or tick: decoding it, the core's handling, the records and pins that it makes the
daemon write, and encoding the answer, in processor time. The limit is 2 ms. The collector of garbage is set
as there.
"""

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvmanager import pin_file, records
from kvmanager.__main__ import COLLECT_AFTER
from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import TOKEN_BYTES, hash_chain, root_hash, salt_digest, token_array
from kvmanager.protocol import (
    MAX_PAGE,
    PROTOCOL_VERSION,
    AuditQuery,
    BlockQuery,
    BlocksQuery,
    Choice,
    Clear,
    Directives,
    Ended,
    EventsQuery,
    Evict,
    ExplainQuery,
    FrontendHello,
    HoldersQuery,
    Layout,
    Pin,
    PlanQuery,
    Progress,
    Query,
    Ready,
    RequestsQuery,
    RunnerHello,
    SamplingParams,
    StatsQuery,
    StepReport,
    Submit,
    ToManager,
    Unpin,
    Welcome,
    decode_to_manager,
    encode,
)
from kvmanager.state import Effects, Policy
from kvmanager.tier.tiers import Content, Tier
from services.backend import in_parts

BLOCK_SIZE = 16
LAYOUT = Layout("bench", "bfloat16", BLOCK_SIZE, 30, 3, 64)
SEQUENCES = 64
LIMIT = 2.0  # milliseconds
TENANT = "ab" * 16
EXPLAINED = (8192, 32768, 131072)  # tokens


class Filled:
    """A core whose pool is full."""

    def __init__(self, num_blocks: int, directory: str) -> None:
        self.random = random.Random(1)
        self.num_blocks = num_blocks
        self.directory = directory
        self.refused = 0  # commands
        self.core = Core(
            "bench", "/pool", Policy(watermark=0.0, tenant_pin_budget=0.25, resume="promote"), 0.0
        )
        self.core.attach(BlockPool(num_blocks, LAYOUT), tier=Tier(num_blocks, self.kept(num_blocks)))
        runner = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, SEQUENCES, 1 << 20)
        frontend = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc:///tokens")
        self.runner, self.frontend = (self.greet(hello) for hello in (runner, frontend))
        self.call(self.runner, Ready())
        tokens, longest = num_blocks // 2 // SEQUENCES * BLOCK_SIZE, max(EXPLAINED)
        others = (num_blocks // 2 * BLOCK_SIZE - longest) // SEQUENCES // BLOCK_SIZE * BLOCK_SIZE
        self.prompts = [self.prompt(others) for _ in range(SEQUENCES)] + [self.prompt(longest)]
        for number, prompt in enumerate(self.prompts):
            self.run(f"cached-{number}", prompt, end=True)
        for number in range(SEQUENCES):
            self.run(f"running-{number}", self.prompt(tokens - BLOCK_SIZE), end=False)

    def kept(self, number: int) -> Iterator[tuple[int, Content]]:
        """What the tier holds: a long prompt, and others."""
        self.on_disk = self.prompt(max(EXPLAINED))
        packed = token_array(self.on_disk).tobytes()
        chain = hash_chain(root_hash(LAYOUT), packed, BLOCK_SIZE * TOKEN_BYTES, salt_digest("", TENANT))
        for slot in range(len(chain), number):
            digest = self.random.randbytes(32)
            yield slot, Content(digest, bytes(32), b"", bytes(4 * BLOCK_SIZE))
        yield from ((slot, Content(*held)) for slot, held in enumerate(chain))

    def prompt(self, length: int) -> list[int]:
        return self.random.choices(range(49152), k=length)

    def greet(self, hello: RunnerHello | FrontendHello) -> int:
        answer, _ = self.core.hello(0.0, hello)
        assert isinstance(answer, Welcome)
        return answer.session.client_id

    def call(self, client: int, message: ToManager) -> list[Any]:
        return self.carry_out(self.core.handle(1.0, client, message))

    def carry_out(self, effects: Effects) -> list[Any]:
        """As the daemon does it. The answers."""
        pool = self.core.state.pool
        assert pool is not None
        for block in effects.records:
            records.pack(pool.record(block), BLOCK_SIZE)
        if effects.pins:
            pin_file.write(self.directory, effects.pins)
        for _, answer in effects.messages:
            encode(answer)
        return [answer for _, answer in effects.messages]

    def run(self, name: str, prompt: list[int], end: bool) -> None:
        """Submit, compute the prompt, and end or not."""
        sampling = SamplingParams(BLOCK_SIZE, 1)
        submit = Submit(name, 0, 0.0, tuple(prompt), (Choice(0),), sampling, tenant=TENANT if end else "")
        answers = self.call(self.frontend, submit)
        (start,) = (start for each in answers if isinstance(each, Directives) for start in each.starts)
        report = StepReport(progress=(Progress(start.start_id, 0, (), len(prompt)),))
        if end:
            report = StepReport(ended=(Ended(start.start_id, 0, (), len(prompt), "finished"),))
        self.call(self.runner, report)

    def ask(self, question: Query) -> float:
        """Milliseconds of the longest of its messages, and of the ticks until its answer has come."""
        times: list[float] = []
        for data in [encode(message) for message in in_parts(question)]:
            self.timed(times, None)
            answers = self.timed(times, data)
        while not answers:
            answers = self.timed(times, None)
        self.refused += bool(getattr(answers[0], "code", ""))
        return max(times)

    def timed(self, times: list[float], data: bytes | None) -> list[Any]:
        """The answers to a message, or of a tick."""
        core, began = self.core, time.thread_time()
        answers = self.carry_out(
            core.tick(1.0) if data is None else core.handle(1.0, self.frontend, decode_to_manager(data))
        )
        times.append((time.thread_time() - began) * 1e3)
        return answers


def questions(filled: Filled) -> dict[str, Callable[[], Iterator[Query]]]:
    """Each as often as it takes to see all of it."""
    size, last = filled.num_blocks, filled.core.state.at().sequence
    texts = {size: tuple(filled.prompts[-1][:size]) for size in EXPLAINED}
    other, on_disk = tuple(filled.prompts[4]), tuple(filled.on_disk)
    new = tuple(filled.prompt(EXPLAINED[-1]))
    every, some = range(0, size, MAX_PAGE), range(0, size, 256 * 8)
    oldest = max(last - 65536, 0)

    def map_pages(**more: Any) -> Iterator[Query]:
        return (BlocksQuery(1, first, MAX_PAGE, **more) for first in every)

    return {
        "stats": lambda: iter([StatsQuery(1)] * 20),
        "map": map_pages,
        "map with content": lambda: map_pages(content=True),
        "map of a tenant": lambda: map_pages(content=True, tenant=TENANT),
        "the tier with content": lambda: map_pages(content=True, tier="disk"),
        "events": lambda: (EventsQuery(1, "bench", at) for at in range(oldest, last, 1024)),
        "a block": lambda: (BlockQuery(1, block) for block in range(0, size, 997)),
        "holders": lambda: iter([HoldersQuery(1)] * 20),
        "requests": lambda: iter([RequestsQuery(1)] * 20),
        "audit": lambda: (AuditQuery(1, first, 256) for first in (*some, size - 256)),
        **{
            f"explain {size} tokens": lambda size=size: iter(
                [ExplainQuery(1, texts[size], tenant=TENANT)] * 20
            )
            for size in EXPLAINED
        },
        f"explain {EXPLAINED[-1]} on disk": lambda: iter([ExplainQuery(1, on_disk, tenant=TENANT)] * 20),
        f"plan {EXPLAINED[-1]} on disk": lambda: iter([PlanQuery(1, on_disk, 16, tenant=TENANT)] * 20),
        f"explain {EXPLAINED[-1]} new tokens": lambda: iter([ExplainQuery(1, new)] * 20),
        **{
            f"plan {size} tokens": lambda size=size: iter([PlanQuery(1, texts[size], 16, tenant=TENANT)] * 20)
            for size in EXPLAINED
        },
        **{
            f"pin {size} tokens": lambda size=size: iter([Pin(1, "p", texts[size], "", 60.0, TENANT)] * 20)
            for size in EXPLAINED
        },
        "pin the same, and another": lambda: iter(
            [Pin(1, name, texts[EXPLAINED[-1]], "", 60.0, TENANT) for name in "qr"] * 10
        ),
        "replace by another text": lambda: iter(
            [Pin(1, "p", text, "", 60.0, TENANT) for text in (other, texts[EXPLAINED[-1]])] * 10
        ),
        "stats beside pins": lambda: iter([StatsQuery(1)] * 20),
        "unpin": lambda: iter([Unpin(1, name, TENANT) for name in "pqr"]),
        **{
            f"evict {size} tokens": lambda size=size: iter([Evict(1, texts[size], tenant=TENANT)] * 20)
            for size in EXPLAINED
        },
        "evict a prefix": lambda: iter([Evict(1, filled_prefix(filled), tenant=TENANT)] * 40),
        "clear, refused": lambda: iter([Clear(1)] * 20),
        "clear a tenant": lambda: iter([Clear(1, False, TENANT)] * 100),
        "pin before a clear": lambda: iter([Pin(1, "p", texts[EXPLAINED[-1]][:60000], "", 60.0, TENANT)]),
        "clear by force": lambda: iter([Clear(1, True)] * 1500),
    }


def filled_prefix(filled: Filled) -> tuple[int, ...]:
    return tuple(filled.prompts[5][:BLOCK_SIZE])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        measure(Filled(arguments.blocks, directory))


def measure(filled: Filled) -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    filled.core.handle(1.0, filled.frontend, EventsQuery(1, tenant=TENANT))
    for _ in range(100):  # until all events so far were looked at
        filled.core.tick(1.0)
    print(f"{filled.num_blocks} blocks, {SEQUENCES} sequences, events to {filled.core.state.at().sequence}")
    for name, ask in questions(filled).items():
        refused = filled.refused
        times = sorted(filled.ask(message) for message in ask())
        middle, longest = times[len(times) // 2], times[-1]
        mark = "" if longest <= LIMIT else f"  more than {LIMIT:g} ms"
        mark += f"  {filled.refused - refused} refused" if filled.refused > refused else ""
        print(f"{name:<26}{len(times):>6} times   median {middle:6.3f} ms   longest {longest:6.3f} ms{mark}")


if __name__ == "__main__":
    main()
