"""What is explained and planned over HTTP is what a request then gets from the real core, over random
histories.
"""

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.kvmanager.fake_clients import BLOCK_SIZE
from tests.services.kv_world import KvWorld

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tail: [*([0] * 9), *tail])
histories = st.lists(st.tuples(prompts, st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(histories, prompts, st.integers(1, 6), st.integers(1, 2), st.sampled_from([10, 16, 40]))
def test_a_request_gets_what_was_explained(
    history: list[tuple[list[int], int, int]], prompt: list[int], length: int, n: int, num_blocks: int
) -> None:
    world = KvWorld(num_blocks)
    for tokens, max_tokens, steps in history:
        world.run(tokens, steps=steps, max_tokens=max_tokens)
    body = {"prompt": prompt}
    explained = world.post("root", "explain", **body)
    planned = world.post("root", "plan", **body, max_tokens=length, n=n)
    event(planned["outcome"])
    event(explained["reason"])
    world.starts.clear()
    pool = world.core.state.pool
    assert pool is not None
    before = {block: pool.block_hash[block] for block in range(num_blocks) if pool.block_hash[block]}
    name = world.run(prompt, steps=0, max_tokens=length, n=n)
    started = [start for start in world.starts if start.request_id == name]
    assert (planned["outcome"] == "start") == bool(started), planned
    assert (planned["outcome"] == "refuse") == (name in world.asker.rejected), planned
    if not started:
        return
    (sequence,) = started[0].sequences
    assert sequence.num_cached_tokens == planned["cached_tokens"] == explained["cached_tokens"]
    reused = [block["block"] for block in planned["reuse"]]
    assert [block for block, _ in sequence.block_table[: len(reused)]] == reused
    assert len(sequence.block_table) == len(reused) + planned["allocate"]
    assert explained["cached_tokens"] == sum(block["num_tokens"] for block in explained["blocks"])
    evicted = {block for block, digest in before.items() if pool.block_hash[block] != digest}
    assert evicted == {block["block"] for block in planned["evict"]}
    if explained["difference"] is not None:
        check_difference(explained, prompt)
    else:
        assert explained["reason"] in ("hit", "never_seen", "evicted")


def check_difference(explained: dict[str, Any], prompt: list[int]) -> None:
    """It begins where the hit ends, and both sides are right."""
    found = explained["difference"]
    assert found["token"] == explained["cached_tokens"]
    assert divmod(found["token"], BLOCK_SIZE) == (found["block_index"], found["offset_in_block"])
    end = (found["block_index"] + 1) * BLOCK_SIZE
    assert found["yours"]["token_ids"] == prompt[found["token"] : end]
    assert found["yours"]["token_ids"][:1] != found["cached"]["token_ids"][:1]
    assert explained["advice"]
