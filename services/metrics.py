"""`/metrics`: vLLM's names where they mean the same, `pagekeeper_` for the rest, in Prometheus' text
format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from kvmanager.protocol import Stats
from services.counters import CounterFile, CounterSpec, HistogramSpec

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
_TOKENS: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)

PROMPT_TOKENS: Final = CounterSpec("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
GENERATION_TOKENS: Final = CounterSpec("vllm:generation_tokens", "Tokens generated")
REQUESTS: Final = CounterSpec(
    "vllm:request_success", "Requests that ended, by why", "finished_reason", FINISH_REASONS
)
RESUBMITTED: Final = CounterSpec(
    "pagekeeper_resubmitted_requests", "Submissions repeated after a runner or the manager was lost"
)
STALE_EVENTS: Final = CounterSpec(
    "pagekeeper_stale_token_events", "Token events that no live request waits for"
)
UNREADABLE: Final = CounterSpec(
    "pagekeeper_unreadable_token_batches", "Messages on the token socket that are no token batch"
)
TAKEN_OVER: Final = CounterSpec(
    "pagekeeper_taken_over_streams", "Resumable streams continued in the place of a frontend that ended"
)
TTFT: Final = HistogramSpec("vllm:time_to_first_token_seconds", "From arrival to the first token", _SECONDS)
ITL: Final = HistogramSpec("vllm:inter_token_latency_seconds", "Between tokens of one choice", _SECONDS)
TPOT: Final = HistogramSpec(
    "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, by request", _SECONDS
)
E2E: Final = HistogramSpec("vllm:e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
PROMPT_LENGTH: Final = HistogramSpec("vllm:request_prompt_tokens", "Prompt tokens by request", _TOKENS)
OUTPUT_LENGTH: Final = HistogramSpec("vllm:request_generation_tokens", "Generated tokens by request", _TOKENS)

SPECS: Final = (
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    REQUESTS,
    RESUBMITTED,
    STALE_EVENTS,
    UNREADABLE,
    TAKEN_OVER,
    TTFT,
    ITL,
    TPOT,
    E2E,
    PROMPT_LENGTH,
    OUTPUT_LENGTH,
)


class Metrics:
    """This frontend's counts, and the answer for all of them. `directory` is the pool directory."""

    def __init__(self, directory: Path, name: str, model_name: str) -> None:
        self._file = CounterFile(directory / "metrics", name, SPECS)
        self._model_name = model_name

    def count(self, spec: CounterSpec, amount: float = 1.0, value: str = "") -> None:
        """Add to a counter; `value` is its label's."""
        self._file.add(self._file.start[spec.name] + spec.values.index(value), amount)

    def observe(self, spec: HistogramSpec, value: float, times: int = 1) -> None:
        self._file.observe(spec, value, times)

    def render(self, stats: Stats | None) -> bytes:
        """The text; `stats` is the manager's answer, None if it did not come in time (then its figures are
        absent).
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self._families(stats)))
        return generate_latest(registry)

    def close(self) -> None:
        self._file.close()

    def _families(self, stats: Stats | None) -> list[Metric]:
        up = GaugeMetricFamily("pagekeeper_manager_up", "Whether the KV manager answered this scrape")
        up.add_metric([], float(stats is not None))
        families = [up, *self._own()]
        return families if stats is None else [*families, *self._managers(stats)]

    def _own(self) -> Iterator[Metric]:
        totals = self._file.totals()
        for spec in SPECS:
            start = self._file.start[spec.name]
            values = totals[start : start + spec.width]
            if isinstance(spec, CounterSpec):
                names = ["model_name", *([spec.label] if spec.label else [])]
                counter = CounterMetricFamily(spec.name, spec.help, labels=names)
                for label, value in zip(spec.values, values, strict=True):
                    counter.add_metric([self._model_name, *([label] if spec.label else [])], value)
                yield counter
            else:
                yield self._histogram(spec, values)

    def _histogram(self, spec: HistogramSpec, values: list[float]) -> Metric:
        buckets, total = [], 0.0
        for bound, count in zip([*map(str, spec.buckets), "+Inf"], values[:-1], strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(spec.name, spec.help, labels=["model_name"])
        family.add_metric([self._model_name], buckets, values[-1])
        return family

    def _managers(self, stats: Stats) -> Iterator[Metric]:
        pool = stats.pool
        used = pool.reserved + pool.sealed
        gauges = (
            ("vllm:num_requests_running", "Requests that a runner works on", stats.running),
            ("vllm:num_requests_waiting", "Requests that wait for room", stats.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the blocks in use (1 is all)",
                used / max(1, pool.num_blocks),
            ),
            ("pagekeeper_blocks", "Blocks in the pool", pool.num_blocks),
            ("pagekeeper_free_blocks", "Blocks that hold nothing", pool.free),
            ("pagekeeper_used_blocks", "Blocks held by running requests (and runners' credits)", used),
            ("pagekeeper_used_tokens", "Tokens in used blocks, each block counted once", stats.used_tokens),
            (
                "pagekeeper_waste_ratio",
                "Share of the slots in used blocks that hold no token (0 with none in use)",
                1 - stats.used_tokens / (used * pool.block_size) if used else 0.0,
            ),
            ("pagekeeper_cached_blocks", "Blocks that only the cache holds: evictable", pool.cached),
            ("pagekeeper_quarantined_blocks", "Blocks whose owner may still write them", pool.quarantined),
            (
                "pagekeeper_tier_slots",
                "Blocks that the disk tier may hold (0: there is none)",
                stats.tier.num_slots,
            ),
            ("pagekeeper_tier_blocks", "Blocks in the disk tier", stats.tier.blocks),
            ("pagekeeper_tier_bytes", "Bytes of these blocks", stats.tier.bytes),
            ("pagekeeper_runners", "Runners that are registered", len(stats.runners)),
            ("pagekeeper_ready_runners", "Runners that take requests", sum(r.ready for r in stats.runners)),
            ("pagekeeper_running_sequences", "Sequences on runners", sum(r.running for r in stats.runners)),
        )
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_cache_hits),
            ("vllm:num_preemptions", "Requests that had to give way", stats.preemptions),
            ("pagekeeper_prefix_waits", "Waits for a prefix that another computes", stats.prefix_waits),
            (
                "pagekeeper_recomputed_tokens",
                "Tokens computed once more after a preemption",
                stats.recomputed_tokens,
            ),
            ("pagekeeper_evicted_blocks", "Cached blocks evicted", stats.evictions),
            ("pagekeeper_demoted_blocks", "Blocks copied to the disk tier", stats.tier.demotions),
            ("pagekeeper_promoted_blocks", "Blocks copied back from the disk tier", stats.tier.promotions),
            ("pagekeeper_tier_failures", "Copies to or from the disk tier that failed", stats.tier.failures),
            ("pagekeeper_rejected_requests", "Requests that the manager refused", stats.rejected),
            ("pagekeeper_dropped_messages", "Messages that the manager dropped", stats.dropped_messages),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class _Snapshot(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
