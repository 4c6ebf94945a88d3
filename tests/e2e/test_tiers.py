"""The disk tier under the served model: what was evicted comes back with equal text, after a restart too."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.test_cache import cached, tokens

BLOCK = 16 * 30 * 2 * 3 * 64 * 4  # bytes, float32
PROMPTS = [tokens(300 + i, 100) for i in range(8)]
FIRST_TIME, AGAIN = 0, 96  # at least: what is still in the pool shares one block more in part


def answers(server: Server) -> list[tuple[int, str]]:
    """Cached tokens and text of each prompt."""
    found = []
    for prompt in PROMPTS:
        answer = server.complete(prompt, max_tokens=8, ignore_eos=True)
        found.append((cached(answer), answer["choices"][0]["text"]))  # type: ignore[index]
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "blocks"


def test_evicted_prompts_come_back_also_after_a_restart_with_equal_texts(disk: Path) -> None:
    # 30 blocks hold four of the eight prompts.
    settings = {"pool_bytes": 30 * BLOCK, "disk_tier": disk, "disk_bytes": "200M", "resume": "promote"}
    with Server(**settings) as server:
        first = answers(server)
        assert {hits for hits, _ in first} == {FIRST_TIME}
        assert server.metrics()["pagekeeper_evicted_blocks_total"] > 20
        second = answers(server)
        assert [text for _, text in second] == [text for _, text in first]
        assert min(hits for hits, _ in second) >= AGAIN
        metrics = server.metrics()
        assert metrics["pagekeeper_promoted_blocks_total"] >= 24
        assert metrics["pagekeeper_demoted_blocks_total"] >= 24
        assert metrics["pagekeeper_tier_blocks"] * BLOCK == metrics["pagekeeper_tier_bytes"] > 0
        assert metrics["pagekeeper_tier_failures_total"] == 0
    assert disk.stat().st_size <= 200 << 20
    with Server(**settings) as server:  # another pool, empty
        kept = server.metrics()["pagekeeper_tier_blocks"]
        assert kept >= 24
        third = answers(server)
        assert [text for _, text in third] == [text for _, text in first]
        assert sum(hits for hits, _ in third) >= 4 * AGAIN
        assert server.metrics()["pagekeeper_promoted_blocks_total"] >= 24


def test_under_pressure_texts_stay_equal_with_blocks_that_come_back(tmp_path: Path) -> None:
    prompts = [tokens(400 + i, 48) for i in range(4)]
    # 14 blocks hold little more than half of what four requests of 48 + 40 tokens ask for.
    settings = {"pool_bytes": 14 * BLOCK, "disk_tier": tmp_path / "tier", "disk_bytes": "200M"}
    with Server(**settings, resume="promote") as server:
        alone = [server.text(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as crowd:
            again = list(crowd.map(lambda p: server.text(p, max_tokens=40, ignore_eos=True), prompts))
        assert again == alone
        metrics = server.metrics()
        assert metrics["vllm:num_preemptions_total"] > 0
        assert metrics["pagekeeper_promoted_blocks_total"] > 0
