"""A pool that holds a tenth of what is asked for costs time only: every text is whole, and in its turn."""

from typing import Any

import httpx

from tests.e2e.server import Server

# fmt: off
SUBJECTS = [
    "Bread", "Rivers", "Horses", "Music", "Gold", "Rain", "Books", "Ships",
    "Dogs", "Roads", "Salt", "Trees", "Fire", "Stars", "Stones", "Birds",
]
# fmt: on
PROMPTS = [
    f"{subject} have been with us for thousands of years, and every child knows a story about them. One day "
    "an old teacher explained to the class why they matter so much today. She said:"
    for subject in SUBJECTS
]
"""They differ from the first token on, so that none waits for another's prefix."""
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "min_p": 0.05, "seed": 5}]
"""Without the thousands of tokens that are next to impossible: between those the last bit decides."""
MAX_TOKENS = 32
BLOCKS_EACH = 5  # of 16 tokens: a prompt has 35 to 40 tokens, and the last one drawn is never computed
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4  # of the packaged model in float32
NUM_BLOCKS = len(PROMPTS) * BLOCKS_EACH // 10


def answers(server: Server, **sampling: Any) -> tuple[list[str], list[int], list[int]]:
    """All prompts in one call, so that they arrive in their order: the texts, then who began and who ended,
    in order of time.
    """
    texts = [""] * len(PROMPTS)
    began: list[int] = []
    ended: list[int] = []
    for chunk in server.stream(PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling):
        choices: Any = chunk["choices"]
        for choice in choices:
            index = choice["index"]
            if index not in began:
                began.append(index)
            texts[index] += choice["text"]
            if choice["finish_reason"]:
                ended.append(index)
    return texts, began, ended


def test_a_tenth_of_the_blocks_gives_the_same_texts_in_order_of_arrival(served: Server) -> None:
    with Server(pool_bytes=NUM_BLOCKS * BLOCK_BYTES) as server:
        for sampling in SAMPLINGS:
            want, _, _ = answers(served, **sampling)
            preempted = server.metrics()["vllm:num_preemptions_total"]
            texts, began, ended = answers(server, **sampling)
            assert texts == want
            assert began == sorted(began)
            assert ended == sorted(ended)
            assert server.metrics()["vllm:num_preemptions_total"] > preempted
        assert server.metrics()["pagekeeper_blocks"] == NUM_BLOCKS
        assert server.metrics()["pagekeeper_recomputed_tokens_total"] > 0
        body = {"model": server.model, "prompt": [7] * 600, "max_tokens": 100}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 400
        assert "44 blocks" in refused.json()["error"]["message"]
        assert f"the pool has {NUM_BLOCKS}" in refused.json()["error"]["message"]
