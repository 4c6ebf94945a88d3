"""What a step costs the manager's core: 64 sequences that decode, some finishing and others starting
meanwhile.

    python -m tests.bench.bench_core [--sequences 64] [--steps 20000]

The driver plays a runner exactly as the protocol has it: credits one block boundary ahead, at most one
report per step, sent only if something changed. Lengths are as in a chat load: prompts of 32 to 256 tokens
of which a part is shared, outputs of 32 to 256. Only the core's own processor time counts, submits and
starts included; the driver's does not. What the daemon does 20 times per second whatever happens, a tick, is
apart. The last part shows that steps in which no block fills send nothing.
"""

import argparse
import gc
import random
import time
from collections import Counter, deque

from kvmanager import records
from kvmanager.__main__ import COLLECT_AFTER
from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    BlockRef,
    Choice,
    Directives,
    Ended,
    FrontendHello,
    Layout,
    Progress,
    Ready,
    RunnerHello,
    SamplingParams,
    Start,
    StepReport,
    Submit,
    Taken,
    ToManager,
    Welcome,
)
from kvmanager.state import Policy

BLOCK_SIZE = 16
STEPS_PER_TICK = 4
LAYOUT = Layout("bench", "bfloat16", BLOCK_SIZE, 30, 3, 64)


class Stream:
    """One running sequence of the driver."""

    __slots__ = ("capacity", "computed", "key", "length", "tokens", "told")

    def __init__(self, start: Start) -> None:
        given = start.sequences[0]
        self.key = (start.start_id, given.choice)
        self.tokens = list(start.prompt_token_ids)
        self.told = len(self.tokens)
        self.length = len(self.tokens) + start.sampling.max_tokens
        self.capacity = len(given.block_table) * BLOCK_SIZE
        self.computed = given.num_cached_tokens


class Bench:
    """A core, one frontend, and a runner with a fixed number of sequences."""

    def __init__(self, num_sequences: int, num_blocks: int, seed: int, churn: bool = True) -> None:
        self.random = random.Random(seed)
        self.core = Core("bench", "/pool", Policy(watermark=0.0), 0.0)
        self.core.attach(BlockPool(num_blocks, LAYOUT))
        runner = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, num_sequences, 4096)
        frontend = FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc:///tokens")
        self.runner, self.frontend = (self.greet(hello) for hello in (runner, frontend))
        self.streams: list[Stream] = []
        self.credits: deque[BlockRef] = deque()
        self.wanted = 0
        self.facts: tuple[list[Progress], list[Ended], list[Taken]] = ([], [], [])
        self.sources_read: list[tuple[int, int]] = []
        self.seconds = self.record_seconds = self.tick_seconds = 0.0
        self.ticks = 0
        self.submitted = self.reports = self.silent = self.sat_out = 0
        self.call(self.runner, Ready())
        for _ in range(num_sequences if churn else 0):
            self.submit()

    def greet(self, hello: RunnerHello | FrontendHello) -> int:
        answer, _ = self.core.hello(0.0, hello)
        assert isinstance(answer, Welcome)
        return answer.session.client_id

    def call(self, client_id: int, message: ToManager) -> None:
        """One event, timed: the core, and the records that it wants written."""
        pool = self.core.state.pool
        assert pool is not None
        began = time.thread_time()
        effects = self.core.handle(1.0, client_id, message)
        decided = time.thread_time()
        for block in effects.records:
            records.pack(pool.record(block), BLOCK_SIZE)
        self.seconds += decided - began
        self.record_seconds += time.thread_time() - decided
        for _, answer in effects.messages:
            if isinstance(answer, Directives):
                self.credits.extend(answer.credits)
                self.streams.extend(Stream(start) for start in answer.starts)
                starts = (start for start in answer.starts if start.sequences[0].copy_from)
                self.sources_read.extend((start.start_id, 0) for start in starts)

    def submit(self) -> None:
        self.submitted += 1
        shared = [7] * self.random.choice([0, 32, 128])
        prompt = shared + [self.random.randrange(49152) for _ in range(self.random.randrange(32, 128))]
        sampling = SamplingParams(self.random.randrange(32, 256), 1)
        name = f"request-{self.submitted}"
        self.call(
            self.frontend, Submit(name, 0, float(self.submitted), tuple(prompt), (Choice(0),), sampling)
        )

    def tick(self) -> None:
        """What the daemon has done now and then, whatever happens."""
        began = time.thread_time()
        self.core.tick(1.0)
        self.tick_seconds += time.thread_time() - began
        self.ticks += 1

    def step(self) -> None:
        """Report what the last step did and what this one takes; then compute."""
        progress, ended, taken = self.facts
        ready = [stream for stream in self.streams if self.has_room(stream, taken)]
        wanted = self.look_ahead()
        returned = tuple(self.credits.pop() for _ in range(len(self.credits) - wanted))
        if progress or ended or taken or returned or self.sources_read or wanted != self.wanted:
            self.wanted = wanted
            report = StepReport(
                tuple(progress),
                (),
                tuple(ended),
                (),
                tuple(taken),
                returned,
                wanted,
                tuple(self.sources_read),
            )
            self.sources_read.clear()
            self.facts = ([], [], [])
            self.reports += 1
            self.call(self.runner, report)
            for _ in ended:
                self.submit()
        else:
            self.silent += 1
        for stream in ready:
            self.compute(stream)

    def has_room(self, stream: Stream, taken: list[Taken]) -> bool:
        if len(stream.tokens) > stream.capacity:
            if not self.credits:
                self.sat_out += 1
                return False
            taken.append(Taken(*stream.key, (self.credits.popleft(),)))
            stream.capacity += BLOCK_SIZE
        return True

    def look_ahead(self) -> int:
        """Blocks needed at the next step at which any are."""
        needs = Counter(
            stream.capacity - len(stream.tokens)
            for stream in self.streams
            if stream.capacity < stream.length - 1
        )
        return needs[min(needs)] if needs else 0

    def compute(self, stream: Stream) -> None:
        progress, ended, _ = self.facts
        before, stream.computed = stream.computed, len(stream.tokens)
        if stream.computed // BLOCK_SIZE > before // BLOCK_SIZE:
            progress.append(Progress(*stream.key, self.untold(stream, stream.computed), stream.computed))
        stream.tokens.append(self.random.randrange(49152))
        if len(stream.tokens) == stream.length:
            new = self.untold(stream, stream.length)
            ended.append(Ended(*stream.key, new, stream.computed, "finished"))
            self.streams.remove(stream)

    def untold(self, stream: Stream, upto: int) -> tuple[int, ...]:
        new = tuple(stream.tokens[stream.told : upto])
        stream.told = max(stream.told, upto)
        return new


def show_silence() -> None:
    """64 sequences in step: all blocks fill in the same steps, and between those nothing is sent."""
    bench = Bench(64, 4096, seed=1, churn=False)
    for number in range(64):
        name = f"even-{number}"
        sampling = SamplingParams(200, 1)
        prompt = (number,) * 32
        bench.call(bench.frontend, Submit(name, 0, float(number), prompt, (Choice(0),), sampling))
    for _ in range(16):
        bench.step()
    bench.reports = bench.silent = 0
    for _ in range(160):
        bench.step()
    sent, silent = bench.reports, bench.silent
    print(f"64 sequences in step, 160 steps, 10 block boundaries: {sent} reports, {silent} silent steps")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=4096)
    options = parser.parse_args()
    bench = Bench(options.sequences, options.blocks, seed=1)
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)  # as the daemon does
    for _ in range(500):
        bench.step()
    bench.seconds = bench.record_seconds = bench.tick_seconds = 0.0
    bench.reports = bench.silent = bench.sat_out = 0
    for number in range(options.steps):
        bench.step()
        if number % STEPS_PER_TICK == 0:
            bench.tick()
    state = bench.core.state
    assert state.pool is not None
    print(f"{options.sequences} sequences, {options.blocks} blocks of {BLOCK_SIZE}, {options.steps} steps")
    print(f"core per step        {bench.seconds / options.steps * 1e6:8.1f} µs (limit 100)")
    print(f"records per step     {bench.record_seconds / options.steps * 1e6:8.1f} µs")
    print(f"a tick               {bench.tick_seconds / bench.ticks * 1e6:8.1f} µs (every 50 ms)")
    print(f"core per report      {bench.seconds / max(bench.reports, 1) * 1e6:8.1f} µs")
    print(f"steps that sent      {bench.reports / options.steps:8.1%}")
    print(f"steps that sent none {bench.silent / options.steps:8.1%} (no block filled, nothing ended)")
    print(f"sequences sat out    {bench.sat_out:8d}")
    hits, evictions = state.counters.prefix_cache_hits, state.pool.evictions
    print(f"{bench.submitted} requests, {hits} hit tokens, {evictions} evictions")
    show_silence()


if __name__ == "__main__":
    main()
