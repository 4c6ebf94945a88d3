"""From outcomes to figures, and from figures to the table that the README shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.load_client import Run


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Figures:
    """What one workload gave; times in seconds."""

    name: str
    output_tokens_per_s: float
    ttft: tuple[float, float]  # p50, p99
    itl: tuple[float, float]  # p50, p99
    cached_share: float  # of the prompt tokens
    limit_tokens_per_s: float
    fraction: float  # of the matrix-product limit


def fastest(forms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """For each kind of product the shortest time that any form needed."""
    return {kind: min(times[kind] for times in forms.values()) for kind in ("prefill", "decode", "decode_1")}


def limit(run: Run, seconds_per_row: Mapping[str, float]) -> float:
    """Output tokens/s if matrix products were all there is to compute (see matrix_limit)."""
    computed = sum(outcome.prompt_tokens - outcome.cached_tokens for outcome in run.outcomes)
    output = sum(outcome.output_tokens for outcome in run.outcomes)
    decode = seconds_per_row["decode_1" if run.workload.streams == 1 else "decode"]
    return output / (computed * seconds_per_row["prefill"] + output * decode)


def figures(run: Run, seconds_per_row: Mapping[str, float]) -> Figures:
    ttft = [outcome.token_times[0] - outcome.sent for outcome in run.outcomes]
    gaps = [
        later - earlier
        for outcome in run.outcomes
        for earlier, later in zip(outcome.token_times, outcome.token_times[1:], strict=False)
    ]
    rate = sum(outcome.output_tokens for outcome in run.outcomes) / run.seconds
    bound = limit(run, seconds_per_row)
    return Figures(
        run.workload.name,
        rate,
        (percentile(ttft, 0.5), percentile(ttft, 0.99)),
        (percentile(gaps, 0.5), percentile(gaps, 0.99)),
        sum(o.cached_tokens for o in run.outcomes) / sum(o.prompt_tokens for o in run.outcomes),
        bound,
        rate / bound,
    )


def speed_table(rows: Sequence[Figures]) -> str:
    """Markdown; times in milliseconds, `the limit` is that of matrix products in output tokens/s."""
    lines = [
        "| workload | output tokens/s | TTFT p50 / p99, ms | ITL p50 / p99, ms | cached | of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ttft, itl = (f"{1e3 * low:.0f} / {1e3 * high:.0f}" for low, high in (row.ttft, row.itl))
        share = f"{row.fraction:.2f} of {row.limit_tokens_per_s:.0f}"
        cells = (row.name, f"{row.output_tokens_per_s:.0f}", ttft, itl, f"{row.cached_share:.0%}", share)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(peaks: Mapping[str, int]) -> str:
    """Markdown: peak memory by process, and their sum."""
    lines = ["| process | peak memory beyond the pool, MB |", "|---|---|"]
    lines += [f"| {name} | {size / 1e6:.0f} |" for name, size in peaks.items()]
    lines.append(f"| together | {sum(peaks.values()) / 1e6:.0f} |")
    return "\n".join(lines)


def forms_table(limits: Mapping[str, Any]) -> str:
    """Markdown: the times behind the limit, in microseconds per row."""
    lines = [
        f"| products in {limits['dtype']} | prefill, 512 rows | decode, 32 rows | decode, 1 row |",
        "|---|---|---|---|",
    ]
    for name, times in limits["forms"].items():
        cells = " | ".join(f"{1e6 * times[kind]:.0f}" for kind in ("prefill", "decode", "decode_1"))
        lines.append(f"| {name}, µs per row | {cells} |")
    return "\n".join(lines)
