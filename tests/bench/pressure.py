"""What too little memory costs on the served model: throughput with a pool that holds a tenth of what is
asked for at once, beside one that holds half.

    python -m tests.bench.pressure [--requests 256] [--tokens 32]

Half of the requests are greedy, half are sampled with a seed. Fails if any text differs from that without
pressure (float32; plain English and `min_p`, as among thousands of unlikely tokens the last bit decides which
one is drawn). Half the demand is without pressure as long as `max_num_seqs` requests fit: then none is
preempted.
"""

import argparse
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.e2e.server import Server
from tests.e2e.test_pressure import BLOCK_BYTES, PROMPTS, SAMPLINGS

BLOCK_SIZE: Final = 16
PROMPT_TOKENS: Final = 44  # at most
PATIENCE: Final = 900.0  # seconds; a busy machine takes long
SHARES: Final = {"half": 0.5, "a tenth": 0.1}


@dataclass(frozen=True)
class Result:
    """What one pool gave; `texts` in the order of the requests."""

    num_blocks: int
    texts: tuple[str, ...]
    tokens_per_s: float
    preemptions: int
    recomputed_tokens: int


def prompts(count: int) -> list[str]:
    """English, about 40 tokens each, different from the first few on."""
    return [f"{number}. {PROMPTS[number % len(PROMPTS)]}" for number in range(count)]


def ask(server: Server, wanted: list[str], tokens: int, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """All in one call; each choice with `tokens` tokens."""
    body = {"model": server.model, "prompt": wanted, "max_tokens": tokens, "ignore_eos": True, **sampling}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    choices: list[dict[str, Any]] = answer.raise_for_status().json()["choices"]
    return choices


def measure(num_blocks: int, wanted: list[str], tokens: int) -> Result:
    """A server with such a pool, and all requests at once."""
    half = len(wanted) // 2
    with (
        Server(pool_bytes=num_blocks * BLOCK_BYTES, checked=False, threads=0) as server,
        ThreadPoolExecutor(2) as callers,
    ):
        ask(server, ["A short one to begin with"], 4, SAMPLINGS[0])
        began = time.perf_counter()
        calls = [
            callers.submit(ask, server, part, tokens, sampling)
            for part, sampling in zip((wanted[:half], wanted[half:]), SAMPLINGS, strict=True)
        ]
        texts = tuple(choice["text"] for call in calls for choice in call.result())
        seconds = time.perf_counter() - began
        metrics = server.metrics()
    return Result(
        num_blocks,
        texts,
        len(wanted) * tokens / seconds,
        int(metrics["vllm:num_preemptions_total"]),
        int(metrics["pagekeeper_recomputed_tokens_total"]),
    )


def table(results: dict[str, Result]) -> str:
    """Markdown."""
    half = results["half"].tokens_per_s
    names = ("pool", "blocks", "tokens/s", "of half's", "preemptions", "recomputed tokens")
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [
        f"| {share} | {result.num_blocks} | {result.tokens_per_s:.0f} | {result.tokens_per_s / half:.2f} "
        f"| {result.preemptions} | {result.recomputed_tokens} |"
        for share, result in results.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pressure", description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped, too
    wanted = prompts(given.requests)
    demand = given.requests * -(-(PROMPT_TOKENS + given.tokens - 1) // BLOCK_SIZE)
    results: dict[str, Result] = {}
    for name, share in SHARES.items():
        print(f"-- {name} of {demand} blocks", file=sys.stderr, flush=True)
        results[name] = measure(int(share * demand), wanted, given.tokens)
    print(table(results))
    assert results["half"].preemptions == 0, "half the demand is pressure, too: ask for more requests"
    equal = results["a tenth"].texts == results["half"].texts
    print(f"texts equal: {'yes' if equal else 'no'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
