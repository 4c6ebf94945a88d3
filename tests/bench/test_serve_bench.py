"""The benchmark itself: its client against a scripted server, its arithmetic against cases done by hand."""

import asyncio
import json
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from gpu_runner.weights import open_source
from services.text import model_source
from tests.bench import matrix_limit
from tests.bench.load_client import Outcome, Run, run, stream
from tests.bench.memory import Peaks, beyond_pool
from tests.bench.report import fastest, figures, limit, memory_table, percentile, speed_table
from tests.bench.serve_bench import faster
from tests.bench.workloads import Ask, Workload, standard

VOCAB = 49152
Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def event(data: object) -> bytes:
    body = b"data: %s\n\n" % (
        data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    )
    return b"%x\r\n%s\r\n" % (len(body), body)


async def tokens(body: dict[str, object], writer: asyncio.StreamWriter, less: int = 0) -> None:
    """As the real server answers: one event per token, the end of the text, the usage, [DONE]."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    count = int(str(body["max_tokens"])) - less
    for _ in range(count):
        writer.write(event({"choices": [{"text": "a"}], "usage": None}))
        await writer.drain()
    writer.write(event({"choices": [{"text": "", "finish_reason": "length"}], "usage": None}))
    details = {"cached_tokens": 16}
    usage = {"prompt_tokens": 20, "completion_tokens": count, "prompt_tokens_details": details}
    writer.write(event({"choices": [], "usage": usage}) + event(b"[DONE]") + b"0\r\n\r\n")


async def one_less(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    await tokens(body, writer, less=1)


async def refuse(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 503 No\r\n\r\n{"error": "queue is full"}')


class Scripted:
    """A server that answers every request with `answer`; counts how many it has at once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, object]] = []
        self.at_once = self.most_at_once = 0

    async def __aenter__(self) -> "Scripted":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.split("\r\n") if line.startswith("Content-Length"))
        self.bodies.append(json.loads(await reader.readexactly(int(length.split(":")[1]))))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self._answer(self.bodies[-1], writer)
        self.at_once -= 1
        writer.close()


def ask_of(answer: Answer) -> Outcome:
    async def main() -> Outcome:
        async with Scripted(answer) as server:
            outcome = await stream("127.0.0.1", server.port, "m", Ask((1, 2, 3), 8))
            assert server.bodies[0]["prompt"] == [1, 2, 3]
            assert server.bodies[0]["ignore_eos"] is True
            return outcome

    return asyncio.run(main())


def test_a_stream_is_timed_token_by_token_and_counted_by_the_server() -> None:
    outcome = ask_of(tokens)
    assert len(outcome.token_times) == 8  # the event without text is none
    assert outcome.sent <= outcome.token_times[0] <= outcome.token_times[-1]
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (20, 16, 8)


@pytest.mark.parametrize(
    ("answer", "message"), [(one_less, "wanted 8 tokens, got 7"), (refuse, "queue is full")]
)
def test_anything_but_the_tokens_asked_for_ends_the_benchmark(answer: Answer, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ask_of(answer)


def test_a_workload_runs_as_many_at_a_time_as_it_says() -> None:
    workload = Workload("w", 3, tuple(Ask((number,), 4) for number in range(9)))
    seen: list[tuple[int, int]] = []

    async def main() -> tuple[Run, Scripted]:
        three = asyncio.Barrier(3)

        async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
            async with asyncio.timeout(10), three:  # nobody is answered before three are here
                await tokens(body, writer)

        async with Scripted(answer) as server:
            run_of = run("127.0.0.1", server.port, "m", workload, lambda *now: seen.append(now))
            return await run_of, server

    result, server = asyncio.run(main())
    assert len(result.outcomes) == 9
    assert server.most_at_once == 3
    assert seen[-1] == (9, 36)
    assert sorted(str(body["prompt"]) for body in server.bodies) == [f"[{number}]" for number in range(9)]


def test_workloads_are_those_published_and_always_the_same() -> None:
    one, many, shared, mixed = standard(VOCAB)
    assert (one.streams, many.streams, len(many.asks), shared.streams, len(shared.asks)) == (
        1,
        32,
        96,
        16,
        64,
    )
    assert {(len(ask.prompt), ask.output_tokens) for ask in (*one.asks, *many.asks)} == {(128, 128)}
    assert {(len(ask.prompt), ask.output_tokens) for ask in shared.asks} == {(800, 64)}
    assert len({ask.prompt[:768] for ask in shared.asks}) == 1
    assert round(sum(len(ask.prompt) for ask in mixed.asks) / len(mixed.asks)) == 160
    assert round(sum(ask.output_tokens for ask in mixed.asks) / len(mixed.asks)) == 140
    firsts = [
        ask.prompt[:16] for workload in (one, many, mixed) for ask in workload.asks if len(ask.prompt) >= 16
    ]
    assert len(set(firsts)) == len(firsts)  # nothing is found in the cache but what is shared on purpose
    assert list(standard(VOCAB)) == [one, many, shared, mixed]


def a_run(streams: int = 32) -> Run:
    """Two requests of 10 prompt tokens (4 cached in one of them) and 3 output tokens each, in 2 seconds."""
    first = Outcome(0.0, [0.5, 0.6, 0.8], prompt_tokens=10, cached_tokens=0, output_tokens=3)
    second = Outcome(1.0, [1.1, 1.2, 1.3], prompt_tokens=10, cached_tokens=4, output_tokens=3)
    return Run(Workload("w", streams, ()), 2.0, (first, second))


def test_figures_are_as_done_by_hand() -> None:
    seconds = {"prefill": 0.01, "decode": 0.1, "decode_1": 0.5}
    assert limit(a_run(), seconds) == pytest.approx(6 / (16 * 0.01 + 6 * 0.1))
    assert limit(a_run(streams=1), seconds) == pytest.approx(6 / (16 * 0.01 + 6 * 0.5))
    result = figures(a_run(), seconds)
    assert result.output_tokens_per_s == pytest.approx(3.0)
    assert result.ttft == pytest.approx((0.1, 0.5))
    assert result.itl == pytest.approx((0.1, 0.2))
    assert result.cached_share == pytest.approx(0.2)
    assert result.fraction == pytest.approx(3.0 * 0.76 / 6)
    assert "| w | 3 | 100 / 500 | 100 / 200 | 20% | 0.38 of 8 |" in speed_table([result])
    assert "| together | 3 |" in memory_table({"a": 1_000_000, "b": 2_000_000})


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0


def test_the_limit_takes_the_fastest_of_all_forms_and_measurements() -> None:
    one = {"dtype": "x", "forms": {"a": {"prefill": 1.0, "decode": 5.0, "decode_1": 1.0}}}
    other = {"dtype": "x", "forms": {"a": {"prefill": 2.0, "decode": 3.0, "decode_1": 1.0}}}
    assert faster(one, other)["forms"]["a"] == {"prefill": 1.0, "decode": 3.0, "decode_1": 1.0}
    forms = {**one["forms"], "b": {"prefill": 0.5, "decode": 9.0, "decode_1": 9.0}}
    assert fastest(forms) == {"prefill": 0.5, "decode": 5.0, "decode_1": 1.0}


def test_matrix_products_are_all_of_the_models_and_every_form_computes_the_same() -> None:
    config = open_source(model_source.resolve("")).config
    shapes = matrix_limit.layer_shapes(config) * config.num_layers
    assert (
        sum(rows * columns for rows, columns in shapes) == 106_168_320
    )  # SmolLM2-135M without embedding and norms
    weight, x = torch.randn(32, 16), torch.randn(4, 16)
    with torch.inference_mode():
        for form in matrix_limit.FORMS.values():
            torch.testing.assert_close(form(weight)(x), x @ weight.T)


def test_every_form_and_size_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_limit, "SECONDS", 0.0)
    monkeypatch.setattr(matrix_limit, "layer_shapes", lambda config: [(32, 16), (16, 32)])
    config = open_source(model_source.resolve("")).config
    with torch.inference_mode():
        result = dict(matrix_limit.timings(config, torch.float32))
    assert set(result) == set(matrix_limit.FORMS)
    assert all(seconds > 0 for times in result.values() for seconds in times.values())


def test_memory_counts_own_pages_and_not_the_pools() -> None:
    size = 64 << 20
    before = beyond_pool(os.getpid())
    # a mapping, since the allocator may hand out pages that the process already holds
    own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own.write(bytes(size))
    with_own = beyond_pool(os.getpid())
    assert with_own - before > size // 2
    path = Path(f"/dev/shm/pk-bench-{os.getpid()}")
    try:
        with path.open("wb+") as file:
            file.truncate(size)
            shared = mmap.mmap(file.fileno(), size)
        shared.write(bytes(size))
        assert beyond_pool(os.getpid()) - with_own < size // 2
        shared.close()
    finally:
        path.unlink()


def test_a_process_that_dies_while_it_is_measured_is_an_error() -> None:
    async def main() -> None:
        peaks = Peaks({"me": os.getpid()})
        await peaks.stop()
        assert peaks.peaks["me"] > 0
        with pytest.raises(OSError, match="No such file"):
            await Peaks({"gone": 1 << 22}).stop()

    asyncio.run(main())
