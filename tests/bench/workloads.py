"""What the benchmark asks for: prompts of random token ids, each distinct, all from fixed seeds."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

LOWEST_ID = 1000  # below are control and byte tokens


@dataclass(frozen=True)
class Ask:
    """One request: greedy, exactly `output_tokens` tokens."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests, of which `streams` run at a time."""

    name: str
    streams: int
    asks: tuple[Ask, ...]


def tokens(random_ids: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random_ids.choices(range(LOWEST_ID, vocab_size), k=length))


def fixed(name: str, streams: int, requests: int, lengths: tuple[int, int], vocab_size: int) -> Workload:
    """`requests` of the same (prompt, output) lengths in tokens."""
    ids = random.Random(name)
    return Workload(
        name, streams, tuple(Ask(tokens(ids, lengths[0], vocab_size), lengths[1]) for _ in range(requests))
    )


def shared_prefix(vocab_size: int) -> Workload:
    """768 tokens that all share and 32 of their own in, 64 out; 64 requests, 16 at a time."""
    ids = random.Random("shared prefix")
    prefix = tokens(ids, 768, vocab_size)
    return Workload(
        "shared prefix, 768 + 32 in, 64 out",
        16,
        tuple(Ask(prefix + tokens(ids, 32, vocab_size), 64) for _ in range(64)),
    )


def log_normal(vocab_size: int, count: int = 128, means: tuple[float, float] = (160, 140)) -> Workload:
    """Lengths as users have them: log-normal with these means in and out, sigma 0.7, cut at 1,024."""
    ids = random.Random("log-normal mix")

    def lengths(mean: float) -> list[int]:
        drawn = [ids.lognormvariate(0, 0.7) for _ in range(count)]
        scale = mean * count / sum(drawn)
        return [min(1024, max(4, round(length * scale))) for length in drawn]

    pairs = zip(*map(lengths, means), strict=True)
    asks = tuple(Ask(tokens(ids, prompt, vocab_size), output) for prompt, output in pairs)
    return Workload(f"log-normal mix, mean {means[0]} in, {means[1]} out", 32, asks)


def standard(vocab_size: int) -> Iterable[Workload]:
    """The four workloads whose figures are published."""
    yield fixed("one stream, 128 in, 128 out", 1, 6, (128, 128), vocab_size)
    yield fixed("32 streams, 128 in, 128 out", 32, 96, (128, 128), vocab_size)
    yield shared_prefix(vocab_size)
    yield log_normal(vocab_size)
