"""Cases that are known to break caches of this kind, each with a name of its own.

The others of them: `test_core` (an admission that does not fit changes nothing; a request's own hits are not
evicted), `test_submissions` (blocks of a cancelled request wait for the acknowledgement), `test_structures`
(the same text has the same hash in every process; layouts never share one).
"""

from kvmanager.pool.block_pool import CACHED, RESERVED, SEALED
from kvmanager.pool.hashing import content
from kvmanager.protocol import Fenced, Layout, Progress, StepReport
from kvmanager.restore import restore_pool
from tests.kvmanager.fake_clients import LAYOUT, submission
from tests.kvmanager.scene import Scene


def test_the_same_block_twice_in_one_release_is_refused_whole() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 4, max_tokens=9))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 4),), credits_wanted=2))
    one, two = scene.credits(runner)
    free = scene.pool.counts[0]
    scene.send(runner, StepReport(returned=(one, two, one)))
    assert Fenced("boot") in scene.received(runner)
    assert scene.pool.counts[0] == free
    assert scene.pool.state[one[0]] not in (RESERVED, CACHED, SEALED)
    scene.take(scene.core.process_died(scene.now, "r"))
    assert scene.pool.counts[0] == 15


def test_with_two_copies_evicting_one_announces_no_removal() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    starts = [scene.submit(frontend, runner, submission(name, [1] * 4, read_cache=False))[0] for name in "ab"]
    for start in starts:
        scene.end(runner, start, 4)
    pool = scene.pool
    first, second = (start.sequences[0].block_table[0][0] for start in starts)
    digest = pool.block_hash[first]
    assert pool.index.remove(digest, first) is False
    assert pool.index.find(digest) == second
    assert pool.index.remove(digest, second) is True


def test_equal_tokens_of_another_model_never_meet() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    scene.run(frontend, runner, submission("a", [1] * 7))
    others = [getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__]
    pool, _ = restore_pool(
        Layout("other", *others[1:]), [scene.pool.record(block) for block in range(16)], ()
    )
    digest, _, salt, tokens = scene.pool.contents[0]
    for held in (content(pool.root, tokens, salt), (digest, pool.root, salt, tokens)):
        assert pool.find(held) is None
    assert pool.children.most_alike(pool.root, tokens) == (0, 0)


def test_a_block_to_copy_from_is_not_evicted_for_the_same_request() -> None:
    scene = Scene(4)
    runner, frontend = scene.runner(), scene.frontend()
    first = scene.run(frontend, runner, submission("a", [1] * 7, max_tokens=1))
    scene.run(frontend, runner, submission("b", [2] * 8, max_tokens=1))
    assert scene.pool.counts[CACHED] == 4
    start, again = scene.submit(frontend, runner, submission("c", [1] * 7 + [3] * 3, max_tokens=1))
    assert again.copy_from == first.block_table[1]
    assert scene.pool.ref(first.block_table[1][0]) == first.block_table[1]
    assert scene.pool.evictions == 2
    scene.end(runner, start, 10)


def test_a_request_refused_five_times_and_then_admitted_counts_its_lookup_once() -> None:
    scene = Scene(4)
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 12, max_tokens=1))
    scene.send(frontend, submission("b", [2] * 12, max_tokens=1))
    for _ in range(5):
        scene.core.state.admission_due = True
        scene.take(scene.core.tick(scene.now))
    assert scene.core.state.counters.prefix_cache_queries == 12
    scene.end(runner, start, 12)
    assert scene.start(runner).request_id == "b"
    assert scene.core.state.counters.prefix_cache_queries == 24
