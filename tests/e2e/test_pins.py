"""A pinned prefix stays while everything else is evicted, and over a kill of the manager."""

import os
import signal
from typing import Any

import httpx

from tests.e2e.server import Server, wait_until
from tests.e2e.test_cache import cached, tokens

BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4  # of the packaged model in float32
NUM_BLOCKS = 12  # of which a fourth may be pinned: 36 tokens take three
PINNED = tokens(1, 36)
OTHER = tokens(2, 36)


def pins(server: Server, method: str, **options: Any) -> Any:
    answer = httpx.request(method, f"{server.url}/kv/pins", timeout=20, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def press(server: Server, seed: int) -> None:
    """More text than the pool holds, each request small enough to run beside the pin."""
    before = server.metrics()["pagekeeper_evicted_blocks_total"]
    server.complete([tokens(seed + turn, 36) for turn in range(5)], max_tokens=1)
    assert server.metrics()["pagekeeper_evicted_blocks_total"] - before >= 6


def test_a_pinned_prefix_survives_pressure_and_a_kill_of_the_manager() -> None:
    with Server(pool_bytes=NUM_BLOCKS * BLOCK_BYTES) as server:
        text = server.text(PINNED, max_tokens=1)
        server.complete(OTHER, max_tokens=1)
        body = {"name": "system prompt", "prompt": PINNED, "ttl": 600}
        made = pins(server, "POST", json=body)
        assert (made["blocks"], made["tokens"]) == (3, 36)
        press(server, 100)
        assert cached(server.complete(OTHER, max_tokens=1)) == 0
        assert cached(server.complete(PINNED, max_tokens=1)) == 35

        (manager,) = server.children("kvmanager")
        os.kill(manager, signal.SIGKILL)
        wait_until(lambda: server.children("kvmanager") not in ([], [manager]), "another manager")
        wait_until(server.ready, "the service ready again")
        listed = pins(server, "GET")
        assert (listed["pinned_blocks"], listed["budget_blocks"]) == (3, 3)
        (again,) = listed["data"]
        assert (again["name"], again["blocks"], again["tokens"]) == ("system prompt", 3, 36)
        assert again["expires_in"] < made["expires_in"]
        press(server, 200)
        answer = server.complete(PINNED, max_tokens=1)
        assert cached(answer) == 35
        assert answer["choices"][0]["text"] == text  # type: ignore[index]

        refused = httpx.post(
            f"{server.url}/kv/pins", json={**body, "name": "b", "prompt": tokens(204, 36)}, timeout=20
        )
        assert refused.status_code == 409
        assert (
            "would make 6 pinned blocks, and pin_budget allows 3 of 12" in refused.json()["error"]["message"]
        )
        pins(server, "DELETE", params={"name": "system prompt"})
        press(server, 300)
        assert cached(server.complete(PINNED, max_tokens=1)) == 0
