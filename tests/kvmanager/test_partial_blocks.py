"""Token-exact hits: tails that are kept, what is copied from them, and for how long they are held."""

import pytest

from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, SEALED
from kvmanager.protocol import Cancel, Ended, Fenced, Forked, Layout, Progress, StepReport
from kvmanager.restore import restore_pool
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene


def served(num_blocks: int = 16) -> tuple[Scene, int, int]:
    scene = Scene(num_blocks)
    return scene, scene.runner(), scene.frontend()


@pytest.mark.parametrize(("same", "cached"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 5), (11, 11), (12, 12)])
def test_a_prompt_hits_every_token_that_it_shares(same: int, cached: int) -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", list(range(100, 113))))
    prompt = [*range(100, 100 + same), 1, 2, 3, 4, 5]
    again = scene.run(frontend, runner, submission("b", prompt))
    assert again.num_cached_tokens == cached
    assert (again.copy_from is not None) == (cached % BLOCK_SIZE > 0)
    assert scene.core.state.counters.prefix_cache_hits == cached


@pytest.mark.parametrize("length", range(1, 10))
def test_the_last_token_is_always_computed(length: int) -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 9))
    assert scene.run(frontend, runner, submission("b", [1] * length)).num_cached_tokens == length - 1


def test_the_child_that_shares_the_most_is_copied_full_or_partial() -> None:
    scene, runner, frontend = served(32)
    scene.run(frontend, runner, submission("full", [1, 1, 1, 1, 2, 3, 4, 5]))
    scene.run(frontend, runner, submission("tail", [1, 1, 1, 1, 2, 3, 6]))
    partial = scene.run(frontend, runner, submission("a", [1, 1, 1, 1, 2, 3, 6, 9, 9]))
    assert partial.num_cached_tokens == 7
    full = scene.run(frontend, runner, submission("b", [1, 1, 1, 1, 2, 3, 4, 8, 8]))
    assert full.num_cached_tokens == 7
    assert full.copy_from != partial.copy_from


def test_generated_tokens_are_hit_to_the_token() -> None:
    scene, runner, frontend = served()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 5))
    scene.end(runner, start, 7, new=(2, 3, 4))
    following = scene.run(frontend, runner, submission("b", [1] * 5 + [2, 3, 4, 9]))
    assert following.num_cached_tokens == 7


def test_salts_and_other_models_never_meet_in_partial_blocks() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 3, salt="mine"))
    scene.run(frontend, runner, submission("b", [1] * 7))
    assert scene.run(frontend, runner, submission("c", [1] * 3, salt="yours")).num_cached_tokens == 0
    assert scene.run(frontend, runner, submission("d", [1] * 3, salt="mine")).num_cached_tokens == 2
    other = Layout("other", *(getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__[1:]))
    pool, _ = restore_pool(other, [scene.pool.record(block) for block in range(16)], ())
    assert pool.children.most_alike(pool.root, scene.pool.tokens[0]) == (0, 0)


def test_read_cache_off_copies_nothing() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7))
    assert scene.run(frontend, runner, submission("b", [1] * 7, read_cache=False)).copy_from is None


def test_a_source_is_held_until_the_runner_has_copied() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7))
    start, again = scene.submit(frontend, runner, submission("b", [1] * 7 + [2]))
    assert again.copy_from is not None
    source = again.copy_from[0]
    assert scene.pool.state[source] == SEALED
    assert [holder.describe() for holder in scene.pool.ledger.holders(source)] == ["sequence 0 of start 2"]
    scene.send(runner, StepReport(sources_read=((start.start_id, 0),)))
    assert scene.pool.state[source] == CACHED
    scene.send(runner, StepReport(sources_read=((start.start_id, 0),)))
    assert Fenced("boot") in scene.received(runner)


def test_what_was_not_copied_is_not_sealed() -> None:
    """Cancelled before its first step: the block holds nothing, whatever the table says."""
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7))
    start, again = scene.submit(frontend, runner, submission("b", [1] * 7 + [2]))
    scene.send(frontend, Cancel("b", 0))
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (), 7, "cancelled"),)))
    assert scene.pool.state[again.block_table[1][0]] == FREE
    assert not scene.core.state.actives()


def test_computing_before_copying_is_a_fault() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7))
    start, _ = scene.submit(frontend, runner, submission("b", [1] * 7 + [2]))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 8),)))
    assert Fenced("boot") in scene.received(runner)


def test_a_fenced_runner_keeps_its_source_out_of_use() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7))
    _, again = scene.submit(frontend, runner, submission("b", [1] * 7 + [2]))
    scene.send(runner, StepReport(returned=((15, 99),)))
    assert again.copy_from is not None
    (holder,) = scene.pool.ledger.holders(again.copy_from[0])
    assert holder in scene.core.state.quarantines.values()
    scene.take(scene.core.process_died(scene.now, "r"))
    assert scene.pool.counts[QUARANTINED] == 0
    assert scene.pool.state[again.copy_from[0]] == CACHED


def test_a_preempted_sequence_resumes_with_only_its_last_token_to_compute() -> None:
    scene, runner, frontend = served()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 6, max_tokens=9))
    scene.core.state.actives()[0].runner.outbox.preempts += (start.start_id,)
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (5, 6, 7), 8, "preempted"),)))
    (resumed,) = scene.start(runner).sequences
    assert (resumed.output_token_ids, resumed.num_cached_tokens) == ((5, 6, 7), 8)


def test_a_preempted_partial_tail_is_copied_back() -> None:
    scene, runner, frontend = served()
    start, sequence = scene.submit(frontend, runner, submission("a", [1] * 5, max_tokens=9))
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 0, (5, 6), 6, "preempted"),)))
    (resumed,) = scene.start(runner).sequences
    assert (resumed.num_cached_tokens, resumed.copy_from) == (6, sequence.block_table[1])


def test_a_shared_tail_is_sealed_by_the_last_of_its_sharers() -> None:
    scene, runner, frontend = served()
    start, sequence = scene.submit(frontend, runner, submission("a", [1] * 6, n=2))
    scene.send(
        runner,
        StepReport(
            progress=(Progress(start.start_id, 0, (), 6),),
            forked=(Forked(start.start_id, 0, (1,)),),
            ended=(Ended(start.start_id, 0, (2,), 6, "finished"),),
        ),
    )
    tail = sequence.block_table[1][0]
    assert not scene.pool.block_hash[tail]
    scene.send(runner, StepReport(ended=(Ended(start.start_id, 1, (3,), 6, "finished"),)))
    assert scene.pool.is_partial(tail)


def test_a_covered_tail_is_evicted_first() -> None:
    """Its content is the beginning of a block that serves as well: here the copy that was written on."""
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("old", [9] * 5))
    first = scene.run(frontend, runner, submission("a", [1] * 6))
    scene.run(frontend, runner, submission("b", [1] * 6 + [2] * 3))
    assert next(iter(scene.pool.cached)) == first.block_table[1][0]


def test_of_two_equal_tails_one_is_evicted_first() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("old", [9] * 5))
    starts = [scene.submit(frontend, runner, submission(name, [1] * 3, read_cache=False)) for name in "ab"]
    for start, _ in starts:
        scene.end(runner, start, 3)
    order = list(scene.pool.cached)
    tails = [sequence.block_table[0][0] for _, sequence in starts]
    assert (order[0], order[-1]) == (max(tails), min(tails))


def test_copies_are_given_up_where_nothing_else_could_make_room() -> None:
    """A pool of 3 blocks, a request of 3: the block to copy from has to go."""
    scene, runner, frontend = served(3)
    scene.run(frontend, runner, submission("a", [1] * 7, max_tokens=1))
    start, again = scene.submit(frontend, runner, submission("b", [1] * 7 + [2] * 5, max_tokens=1))
    assert (again.num_cached_tokens, again.copy_from) == (4, None)
    scene.end(runner, start, 12)


def test_partial_records_survive_a_restart() -> None:
    scene, runner, frontend = served()
    scene.run(frontend, runner, submission("a", [1] * 7, salt="s"))
    found = [scene.pool.record(block) for block in range(16)]
    pool, _ = restore_pool(LAYOUT, found, ())
    assert pool.counts[CACHED] == 2
    assert [pool.is_partial(block) for block in pool.cached] == [True, False]
    tampered = [record._replace(tokens=record.tokens[:-4]) for record in found]
    assert restore_pool(LAYOUT, tampered, ())[0].counts[CACHED] == 0
