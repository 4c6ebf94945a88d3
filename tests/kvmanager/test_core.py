"""The core by example: submits, hits, starts, ends, eviction and what is refused."""

from typing import Any

from kvmanager.pool.block_pool import CACHED, SEALED
from kvmanager.pool.hashing import Content
from kvmanager.protocol import (
    Accepted,
    Choice,
    Copied,
    Directives,
    Draining,
    Ended,
    Forked,
    Progress,
    Ready,
    SamplingParams,
    Stats,
    StatsQuery,
    StepReport,
    Submit,
    Taken,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene


def snapshot(scene: Scene) -> Any:
    """Everything that a refused event must leave as it was."""
    pool = scene.pool
    return (
        list(pool.state),
        list(pool.generation),
        list(pool.free),
        list(pool.cached),
        [pool.ledger.holders(block) for block in range(pool.num_blocks)],
        pool.index.entries(),
        pool.evictions,
        [request.order for request in scene.core.state.waiting],
        scene.core.state.counters.prefix_cache_queries,
        scene.core.state.counters.prefix_cache_hits,
    )


def test_a_request_is_accepted_started_and_ended() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, sequence = scene.submit(frontend, runner, submission("a", [1] * 10))
    assert scene.received(frontend) == [Accepted("a", 0)]
    assert (start.request_id, start.token_endpoint, sequence.num_cached_tokens) == ("a", "ipc:///f", 0)
    assert len(sequence.block_table) == 3
    scene.end(runner, start, 10, new=(2, 2))
    assert [scene.pool.state[block] for block, _ in sequence.block_table] == [CACHED] * 3


def test_a_repeated_prompt_hits_all_but_its_last_token() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    first = scene.run(frontend, runner, submission("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    again = scene.run(frontend, runner, submission("b", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert (again.num_cached_tokens, again.copy_from) == (7, first.block_table[1])
    assert again.block_table[0] == first.block_table[0]
    assert again.block_table[1] != first.block_table[1]
    longer = scene.run(frontend, runner, submission("c", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert longer.num_cached_tokens == 8
    state = scene.core.state
    assert (state.counters.prefix_cache_queries, state.counters.prefix_cache_hits) == (25, 15)


def test_two_runners_share_what_either_has_computed() -> None:
    scene = Scene()
    one, two, frontend = scene.runner("one"), scene.runner("two"), scene.frontend()
    start, _ = scene.submit(frontend, one, submission("a", [1] * 9))
    _, sequence = scene.submit(frontend, two, submission("b", [2] * 9))
    assert sequence.num_cached_tokens == 0
    scene.end(one, start, 9)
    scene.send(frontend, submission("c", [1] * 9))
    assert scene.start(one).sequences[0].num_cached_tokens == 8
    scene.send(frontend, submission("d", [1] * 9))
    assert scene.core.state.runners[1].seats + scene.core.state.runners[0].seats == 3


def test_salts_and_read_cache_keep_texts_apart() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    scene.run(frontend, runner, submission("a", [1] * 9, salt="mine"))
    assert scene.run(frontend, runner, submission("b", [1] * 9)).num_cached_tokens == 0
    assert scene.run(frontend, runner, submission("c", [1] * 9, salt="yours")).num_cached_tokens == 0
    assert scene.run(frontend, runner, submission("d", [1] * 9, salt="mine")).num_cached_tokens == 8
    assert (
        scene.run(frontend, runner, submission("e", [1] * 9, salt="mine", read_cache=False)).num_cached_tokens
        == 0
    )
    assert scene.core.state.counters.prefix_cache_queries == 36


def test_a_hash_alone_is_never_trusted() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    sequence = scene.run(frontend, runner, submission("a", [1] * 9))
    pool = scene.pool
    block = sequence.block_table[0][0]
    held = Content(*pool.contents[block])
    assert pool.find(held._replace()) == block
    for other in ({"tokens": b"x" * 16}, {"parent_hash": b"other"}, {"salt": b"salt"}):
        assert pool.find(held._replace(**other)) is None


def test_eviction_takes_the_least_recent_chain_from_its_tail() -> None:
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    old = scene.run(frontend, runner, submission("a", [1] * 9, max_tokens=1))
    new = scene.run(frontend, runner, submission("b", [2] * 9, max_tokens=1))
    assert list(scene.pool.cached) == [block for block, _ in (*old.block_table[::-1], *new.block_table[::-1])]
    scene.run(frontend, runner, submission("c", [3] * 13, max_tokens=1))
    assert scene.pool.evictions == 2
    assert scene.run(frontend, runner, submission("d", [1] * 9, max_tokens=1)).num_cached_tokens == 4


def test_a_requests_own_hits_are_not_evicted_for_its_new_blocks() -> None:
    scene = Scene(4)
    runner, frontend = scene.runner(), scene.frontend()
    first = scene.run(frontend, runner, submission("a", [1] * 8, max_tokens=1))
    scene.run(frontend, runner, submission("b", [2] * 8, max_tokens=1))
    again = scene.run(frontend, runner, submission("c", [1] * 8 + [3] * 8, max_tokens=1))
    assert again.num_cached_tokens == 8
    assert again.block_table[:2] == first.block_table


def test_an_admission_that_does_not_fit_changes_nothing() -> None:
    scene = Scene(5)
    runner, frontend = scene.runner(), scene.frontend()
    scene.run(frontend, runner, submission("a", [1] * 8, max_tokens=1))
    scene.submit(frontend, runner, submission("b", [2] * 8, max_tokens=1))
    message = submission("c", [1] * 12 + [3] * 4, max_tokens=1)
    scene.send(frontend, message)
    before = snapshot(scene)
    for _ in range(5):
        scene.core.state.admission_due = True
        scene.take(scene.core.tick(scene.now))
        assert snapshot(scene) == before
    (active,) = scene.core.state.actives()
    scene.send(runner, StepReport(ended=(Ended(active.start_id, 0, (), 8, "finished"),)))
    assert scene.start(runner).sequences[0].num_cached_tokens == 8
    assert scene.core.state.counters.prefix_cache_queries == 8 + 8 + 16


def test_one_that_read_no_cache_reads_what_it_has_computed_when_it_goes_on() -> None:
    scene = Scene()
    one, two, frontend = scene.runner("one"), scene.runner("two"), scene.frontend()
    start, _ = scene.submit(frontend, one, submission("a", [1] * 9, read_cache=False))
    scene.send(one, StepReport((Progress(start.start_id, 0, (2,), 9),)))
    scene.send(one, Draining())
    scene.end(one, start, 9, "preempted")
    (again,) = scene.start(two).sequences
    assert (again.output_token_ids, again.num_cached_tokens) == ((2,), 9)


def test_evicting_one_of_two_copies_keeps_the_hit() -> None:
    scene = Scene(6)
    runner, frontend = scene.runner(), scene.frontend()
    start, one = scene.submit(frontend, runner, submission("a", [1] * 5, max_tokens=2))
    other_start, other = scene.submit(
        frontend, runner, submission("b", [1] * 5, max_tokens=2, read_cache=False)
    )
    assert one.block_table != other.block_table
    scene.end(runner, start, 5)
    scene.end(runner, other_start, 5)
    assert len(scene.pool.cached) == 4
    scene.run(frontend, runner, submission("c", [2] * 20, max_tokens=1))
    assert scene.pool.evictions == 3
    assert scene.run(frontend, runner, submission("d", [1] * 5, max_tokens=2)).num_cached_tokens == 4


def test_forks_share_the_prompt_and_copy_only_its_tail() -> None:
    scene = Scene(64)
    runner, frontend = scene.runner(), scene.frontend()
    start, sequence = scene.submit(frontend, runner, submission("a", [1] * 27, n=4, max_tokens=9))
    assert (len(start.sequences), len(sequence.block_table), sequence.forks) == (1, 7, (1, 2, 3))
    scene.send(
        runner,
        StepReport(
            progress=(Progress(start.start_id, 0, (), 27),),
            forked=(Forked(start.start_id, 0, (1, 2, 3)),),
            credits_wanted=3,
        ),
    )
    assert scene.pool.counts == [64 - 10, 4, 6, 0, 0]
    credits = scene.credits(runner)
    copies = tuple(Copied(start.start_id, choice, 6, credits[choice - 1]) for choice in (1, 2, 3))
    scene.send(runner, StepReport(copied=copies))
    assert scene.pool.counts == [64 - 10, 4, 6, 0, 0]
    scene.send(
        runner,
        StepReport(
            progress=tuple(Progress(start.start_id, choice, (choice + 1,), 28) for choice in range(4)),
            ended=tuple(Ended(start.start_id, choice, (), 28, "finished") for choice in range(4)),
        ),
    )
    assert scene.pool.counts == [64 - 10, 0, 0, 10, 0]
    assert scene.core.state.runners[0].seats == 0


def test_an_unforked_sequence_may_end_for_all_its_choices() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 4, n=3, max_tokens=1))
    scene.end(runner, start, 4)
    assert scene.core.state.runners[0].seats == 0
    assert not scene.core.state.actives()


def test_choices_with_different_output_start_apart() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    choices = (Choice(0, (5,)), Choice(1, (6,)), Choice(2, (5,)))
    message = Submit("a", 3, 0.0, (1, 1), choices, SamplingParams(4, 1))
    start, first = scene.submit(frontend, runner, message)
    assert [(s.choice, s.output_token_ids, s.forks) for s in start.sequences] == [
        (0, (5,), (2,)),
        (1, (6,), ()),
    ]
    assert len(first.block_table) == 1


def test_starts_go_to_the_least_loaded_runner_that_is_ready_and_not_draining() -> None:
    scene = Scene()
    one, two, frontend = scene.runner("one"), scene.runner("two"), scene.frontend()
    for name in "abcd":
        scene.send(frontend, submission(name, [1]))
    for runner in (one, two):
        starts = [start for message in scene.received(runner) for start in message.starts]
        assert len(starts) == 2
    scene.send(one, Draining())
    scene.submit(frontend, two, submission("e", [1]))
    scene.send(two, Draining())
    scene.send(frontend, submission("f", [1]))
    assert len(scene.core.state.waiting) == 1


def test_a_draining_runners_requests_go_on_elsewhere_in_their_order_and_nothing_is_computed_again() -> None:
    scene = Scene()
    one, frontend = scene.runner("one"), scene.frontend()
    starts = [scene.submit(frontend, one, submission(name, [ord(name)] * 6))[0] for name in "ab"]
    for start in starts:
        scene.send(one, StepReport(progress=(Progress(start.start_id, 0, (), 6),), credits_wanted=2))
    credits = tuple(scene.credits(one))
    two = scene.runner("two")
    scene.send(one, Draining())
    (directives,) = scene.received(one)
    assert directives.preempts == tuple(start.start_id for start in starts)
    assert not directives.dismissed
    scene.received(two)
    for start in reversed(starts):  # in whatever order it ends them
        scene.end(one, start, 6, "preempted", (5,))
        assert not scene.received(one)
    scene.send(one, StepReport(returned=credits))
    (directives,) = scene.received(one)
    assert directives == Directives(dismissed=True)
    again = [start for message in scene.received(two) for start in message.starts]
    assert {start.request_id for start in again} == {"a", "b"}
    for start in again:
        (sequence,) = start.sequences
        assert (sequence.output_token_ids, sequence.num_cached_tokens) == ((5,), 6)
    assert scene.core.state.counters.preemptions == 0
    scene.send(one, Draining())
    assert not scene.received(one)


def test_an_idle_runner_that_drains_may_end_at_once() -> None:
    scene = Scene()
    runner = scene.runner()
    scene.send(runner, Draining())
    assert scene.received(runner) == [Directives(dismissed=True)]


def test_starts_go_to_a_silent_runner_only_if_there_is_no_other() -> None:
    scene = Scene()
    silent, other, frontend = scene.runner("silent"), scene.runner("other", max_num_seqs=2), scene.frontend()
    scene.now = 5.0
    scene.send(other, None)
    for name in "ab":
        scene.submit(frontend, other, submission(name, [1]))
    scene.submit(frontend, silent, submission("c", [1]))


def test_credits_are_granted_taken_and_returned() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, sequence = scene.submit(frontend, runner, submission("a", [1] * 4, max_tokens=9))
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 4),), credits_wanted=3))
    credits = scene.credits(runner)
    assert len(credits) == 3
    taken = (Taken(start.start_id, 0, (credits[0],)),)
    scene.send(runner, StepReport(taken=taken, returned=(credits[2],), credits_wanted=1))
    assert not scene.credits(runner)
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (2,) * 5, 8),), credits_wanted=1))
    assert scene.pool.state[credits[0][0]] == SEALED
    (runner_stats,) = stats(scene, frontend).runners
    assert (runner_stats.credits, runner_stats.running, runner_stats.ready) == (1, 1, True)
    assert sequence.block_table[0][0] != credits[0][0]


def stats(scene: Scene, frontend: int) -> Stats:
    scene.received(frontend)
    scene.send(frontend, StatsQuery(1))
    (answer,) = scene.received(frontend)
    assert isinstance(answer, Stats)
    return answer


def test_a_report_age_is_that_of_the_last_message_or_probe() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    scene.now = 5.0
    assert stats(scene, frontend).runners[0].last_report_age == 5.0
    scene.send(runner, None)
    assert stats(scene, frontend).runners[0].last_report_age == 0.0


def test_messages_of_the_wrong_kind_are_dropped_and_counted() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    scene.send(frontend, Ready())
    scene.send(runner, StatsQuery(1))
    scene.core.count_dropped()
    assert stats(scene, frontend).dropped_messages == 3
