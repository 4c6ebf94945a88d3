"""Counters in mapped files: one frontend, several, a killed one; and the text that Prometheus reads."""

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.counters import CounterFile, CounterSpec, HistogramSpec
from services.metrics import SPECS
from tests.services.fake_stack import Stack, says, wait_until

WORDS = CounterSpec("words", "Words", "kind", ("a", "b"))
TIMES = HistogramSpec("times", "Times", (1.0, 2.0))


def test_files_add_up_and_a_successor_goes_on(tmp_path: Path) -> None:
    one, two = (CounterFile(tmp_path, name, (WORDS, TIMES)) for name in ("one", "two"))
    one.add(one.start["words"] + 1, 3)
    two.add(two.start["words"] + 1, 4)
    two.observe(TIMES, 2.0)
    two.observe(TIMES, 5.0, times=2)
    expected = [0, 7, 0, 1, 2, 12.0]
    assert one.totals() == two.totals() == expected
    successor = CounterFile(tmp_path, "two", (WORDS, TIMES))  # of one that was killed: it closed nothing
    successor.add(0, 1)
    assert one.totals() == [1, *expected[1:]]
    one.close()
    assert successor.totals() == [1, 4, *expected[2:]]
    successor.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_schema_is_not_read(tmp_path: Path) -> None:
    old = CounterFile(tmp_path, "old", (WORDS,))
    old.add(0, 9)
    new = CounterFile(tmp_path, "new", (WORDS, TIMES))
    assert new.totals() == [0.0] * 6
    replaced = CounterFile(tmp_path, "old", (WORDS, TIMES))
    assert replaced.totals() == [0.0] * 6


def scrape(url: str) -> dict[str, float]:
    """Sample name (labels but model_name behind it) → value."""
    text = httpx.get(f"{url}/metrics", timeout=20).text
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            values[":".join([sample.name, *labels])] = sample.value
    return values


def test_two_frontends_tell_the_same() -> None:
    with Stack(frontends=2) as stack:
        stack.manager.script = says("one two three")
        for url in stack.urls * 2:
            answer = httpx.post(
                f"{url}/v1/completions", json={"prompt": "Hello there", "max_tokens": 9}, timeout=20
            )
            assert answer.json()["choices"][0]["text"] == "one two three"
        first, second = map(scrape, stack.urls)
        assert first == second
        assert first["vllm:prompt_tokens_total"] == 8
        assert first["vllm:generation_tokens_total"] == 16
        assert first["vllm:request_success_total:stop"] == 4
        assert first["vllm:time_to_first_token_seconds_count"] == 4
        assert first["vllm:inter_token_latency_seconds_count"] == 12
        assert first["vllm:e2e_request_latency_seconds_count"] == 4
        assert first["vllm:e2e_request_latency_seconds_bucket:+Inf"] == 4


def test_the_managers_figures() -> None:
    with Stack() as stack:
        values = scrape(stack.url)
        assert values["pagekeeper_manager_up"] == 1
        assert values["vllm:num_requests_waiting"] == 3
        assert values["vllm:kv_cache_usage_perc"] == 0.3
        assert values["vllm:prefix_cache_queries_total"] == 1000
        assert values["vllm:prefix_cache_hits_total"] == 400
        assert values["vllm:num_preemptions_total"] == 5
        names = ("free", "used", "cached", "quarantined")
        assert [values[f"pagekeeper_{name}_blocks"] for name in names] == [60, 30, 9, 1]
        assert values["pagekeeper_used_tokens"] == 360
        assert values["pagekeeper_waste_ratio"] == 0.25  # of 30 blocks of 16 slots
        stack.manager.deaf = True
        values = scrape(stack.url)
        assert values["pagekeeper_manager_up"] == 0
        assert "vllm:num_requests_waiting" not in values
        assert "vllm:prompt_tokens_total" in values


def test_ready_says_what_is_missing() -> None:
    with Stack() as stack:
        assert httpx.get(f"{stack.url}/ready", timeout=20).status_code == 200
        stack.manager.ready = False
        answer = httpx.get(f"{stack.url}/ready", timeout=20)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "runner-0" in answer.json()["error"]["message"]
        stack.manager.ready, stack.manager.silence = True, 30.0
        answer = httpx.get(f"{stack.url}/ready", timeout=20)
        assert answer.status_code == 503
        assert "runner-0 (silent for 30.0 s, 0 sequences)" in answer.json()["error"]["message"]
        stack.manager.silence = 0.3
        assert httpx.get(f"{stack.url}/ready", timeout=20).status_code == 200


def test_an_abort_is_counted() -> None:
    with Stack() as stack:
        stack.hold()
        try:
            httpx.post(f"{stack.url}/v1/completions", json={"prompt": "x"}, timeout=0.2)
        except httpx.ReadTimeout:
            wait_until(lambda: scrape(stack.url)["vllm:request_success_total:abort"] == 1, "the abort")


def test_metric_names_are_unique() -> None:
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
