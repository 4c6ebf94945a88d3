"""Explain, plan and one block by example: every reason with its story."""

from typing import Any

import msgspec
import pytest

from kvmanager.asking.event_log import EventLog
from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import salt_digest, tenant_fault
from kvmanager.protocol import (
    AuditQuery,
    BlockDetail,
    BlockQuery,
    BlocksQuery,
    EventsQuery,
    ExplainQuery,
    Layout,
    PlanQuery,
    Progress,
    RequestsQuery,
    StepReport,
    TextPart,
    decode_to_frontend,
    decode_to_manager,
    encode,
)
from kvmanager.restore import former_contents
from kvmanager.tier.tiers import Tier
from tests.kvmanager.asking import TENANTS, Asker
from tests.kvmanager.fake_clients import LAYOUT, submission
from tests.kvmanager.scene import Scene

TEXT = list(range(100, 110))  # two full blocks and a half


class AskedScene(Scene):
    """A frontend that asks, and a runner that has computed TEXT."""

    def __init__(self, num_blocks: int = 16, **policy: Any) -> None:
        super().__init__(num_blocks, **policy)
        self.client, self.worker = self.frontend(), self.runner()
        self.asker = Asker(self, self.client)
        self.run(self.client, self.worker, submission("first", TEXT, max_tokens=1))


def test_a_whole_hit() -> None:
    said = AskedScene().asker.explain(TEXT)
    assert (said.reason, said.num_cached_tokens, len(said.blocks), said.block_size) == ("hit", 9, 2, 4)
    assert said.sibling is not None
    assert (said.sibling.token_ids, said.sibling.num_shared) == ((108, 109), 1)


@pytest.mark.parametrize(
    ("tokens", "reason", "cached", "sibling", "shared"),
    [
        ([*TEXT[:6], 7, 7, 7], "partial", 6, (104, 105, 106, 107), 2),
        ([*TEXT[:4], 7, 7], "never_seen", 4, (104, 105, 106, 107), 0),
        ([7, 7, 7], "never_seen", 0, (100, 101, 102, 103), 0),
        ([100], "hit", 0, (100, 101, 102, 103), 0),
        ([], "never_seen", 0, None, 0),
    ],
)
def test_where_a_text_leaves_what_is_cached(
    tokens: list[int], reason: str, cached: int, sibling: tuple[int, ...] | None, shared: int
) -> None:
    said = AskedScene().asker.explain(tokens)
    assert (said.reason, said.num_cached_tokens) == (reason, cached)
    assert (said.sibling and (said.sibling.token_ids, said.sibling.num_shared)) == (
        sibling and (sibling, shared)
    )


def test_who_asks_after_many_events_is_told_when_they_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = AskedScene(4)
    for name in "abc":
        scene.run(scene.client, scene.worker, submission(name, [ord(name)] * 13))  # evicts what was before
    at_once = scene.asker.explain(TEXT)
    assert at_once.reason == "evicted"
    events = scene.pool.log.last
    scene = AskedScene(4)
    for name in "abc":
        scene.run(scene.client, scene.worker, submission(name, [ord(name)] * 13))
    scene.received(scene.client)
    monkeypatch.setattr("kvmanager.core.AT_ONCE", 5)
    scene.send(scene.client, ExplainQuery(1, tuple(TEXT)))
    ticks = 0
    while not (answers := scene.received(scene.client)):
        scene.take(scene.core.tick(scene.now))
        ticks += 1
    assert msgspec.structs.replace(answers[0], query_id=at_once.query_id) == at_once
    assert ticks == (events - 1) // 5
    scene.send(scene.client, ExplainQuery(2, tuple(TEXT)))
    assert len(scene.received(scene.client)) == 1


@pytest.mark.parametrize("tenant", ["", TENANTS[0]])
@pytest.mark.parametrize("too_early", [20, 64])
def test_of_too_many_long_texts_some_get_no_answer_and_none_a_wrong_one(
    tenant: str, too_early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are dropped, be it that many texts wait, or many questions that came too early; but no one's whom
    the others leave no room.
    """
    monkeypatch.setattr("kvmanager.core.MAX_TOO_EARLY", too_early)
    monkeypatch.setattr("kvmanager.core.AT_ONCE", 0)
    scene = AskedScene()
    scene.received(scene.client)
    for number in range(26):
        whose = TENANTS[1] if number == 0 else tenant
        scene.send(scene.client, TextPart(number, tuple(TEXT[:4]), "", whose))
        scene.send(scene.client, TextPart(number, tuple(TEXT[4:8]), "", whose, 4))
        scene.send(scene.client, ExplainQuery(number, tuple(TEXT[8:]), "", whose, 8))
    monkeypatch.setattr("kvmanager.core.AT_ONCE", 1 << 16)
    answers = []
    for _ in range(26):
        scene.take(scene.core.tick(scene.now))
        answers += scene.received(scene.client)
    assert [each.query_id for each in answers] == [0, *range(11, 26)]
    assert {each.num_tokens for each in answers} == {len(TEXT)}


def test_another_salt_is_another_cache() -> None:
    said = AskedScene().asker.explain(TEXT, salt="mine")
    assert (said.reason, said.num_cached_tokens, said.sibling) == ("never_seen", 0, None)


def test_who_needed_the_room_of_what_is_gone() -> None:
    scene = AskedScene(6)
    scene.now = 7.0
    scene.run(scene.client, scene.worker, submission("greedy", [1] * 24, max_tokens=1))
    scene.now = 10.0
    said = scene.asker.explain(TEXT)
    assert said.reason == "evicted"
    assert said.eviction is not None
    assert (said.eviction.seconds_ago, said.eviction.cause) == (3.0, "capacity")
    assert said.eviction.request_id == "greedy"


def test_a_lost_tail_is_said_where_the_text_goes_on_from_it() -> None:
    scene = AskedScene(6)
    scene.run(scene.client, scene.worker, submission("greedy", [1] * 24, max_tokens=1))
    for text in (TEXT[:9], [*TEXT[:8], 5, 5]):  # what came before its tail is the first to be told of
        assert scene.asker.explain(text).reason == "evicted"
    scene.run(scene.client, scene.worker, submission("again", TEXT[:8], max_tokens=1))
    said = scene.asker.explain([*TEXT, 7])
    assert (said.num_cached_tokens, said.reason) == (8, "evicted")
    assert scene.asker.explain([*TEXT[:8], 5, 5]).reason == "never_seen"


def test_a_tenant_is_not_told_whose_room_it_was() -> None:
    scene = Scene(6)
    client, worker = scene.frontend(), scene.runner()
    asker = Asker(scene, client)
    mine = submission("mine", TEXT, max_tokens=1)
    scene.run(client, worker, msgspec.structs.replace(mine, tenant=TENANTS[0]))
    scene.run(client, worker, submission("greedy", [1] * 24, max_tokens=1))
    said = asker.explain(TEXT, tenant=TENANTS[0])
    assert said.eviction is not None
    assert said.eviction.request_id == ""
    assert asker.explain(TEXT).reason == "never_seen"


def test_what_is_being_computed_now() -> None:
    scene = AskedScene()
    scene.submit(scene.client, scene.worker, submission("busy", [5] * 9, max_tokens=3))
    said = scene.asker.explain([5] * 12)
    assert (said.reason, said.computed_by) == ("being_computed", "busy")
    planned = scene.asker.plan([5] * 12)
    assert (planned.outcome, planned.waits_for) == ("wait_for_prefix", "busy")


def test_what_the_tier_has_counts() -> None:
    scene = Scene(0)
    scene.core.attach(BlockPool(8, LAYOUT), tier=Tier(16))
    client, worker = scene.frontend(), scene.runner()
    asker = Asker(scene, client)
    scene.run(client, worker, submission("first", TEXT, max_tokens=1))
    state = scene.core.state
    assert state.tiering is not None
    for number in range(3):
        prompt = [number] * 12
        for copy in list(state.tiering.tier.demoting.values()):
            scene.take(scene.core.copied(scene.now, copy, False, True, 0.1))
        scene.run(client, worker, submission(f"more-{number}", prompt, max_tokens=1))
    said = asker.explain(TEXT)
    assert said.tier_blocks == 2
    assert said.num_cached_tokens == 8
    planned = asker.plan(TEXT)
    assert (planned.outcome, planned.promote) == ("wait_for_tier", 2)


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_what_a_pool_of_another_layout_held(block_size: int) -> None:
    scene = AskedScene()
    records = [scene.pool.record(block) for block in range(16)]
    other = Layout("fingerprint", "float16", block_size, 1, 1, 2)
    log = EventLog(16)
    log.other_layout = former_contents(LAYOUT, records, other, 3.0)
    assert former_contents(LAYOUT, records, LAYOUT, 3.0) == {}
    core = Core("boot", "/pool", scene.core.state.policy, 0.0)
    core.attach(BlockPool(8, other, log))
    scene.core = core
    asker = Asker(scene, scene.frontend())
    scene.now = 5.0
    said = asker.explain(TEXT)
    assert said.reason == "other_layout"
    assert said.eviction is not None
    assert said.eviction.seconds_ago == 2.0
    assert asker.explain([1] * 10).reason == "never_seen"


def test_a_plan_in_words() -> None:
    scene = AskedScene(6)
    start = scene.asker.plan([*TEXT, 1, 2, 3, 4, 5, 6, 7], max_tokens=3)
    assert (start.outcome, start.runner) == ("start", "r")
    assert (len(start.reuse), start.num_copied_tokens, start.num_cached_tokens) == (2, 2, 10)
    assert (start.allocate, start.allocate_at_most) == (3, 3)
    assert start.message == (
        "it starts now on 'r': it reuses 2 cached blocks of 4 tokens and 2 tokens copied from another, "
        "and takes 3 fresh blocks"
    )
    refused = scene.asker.plan([1] * 30)
    assert refused.outcome == "refuse"
    assert "needs 9 blocks" in refused.message
    assert scene.asker.plan([], 1).outcome == "refuse"


def test_a_plan_names_who_would_give_way() -> None:
    scene = AskedScene(6)
    scene.submit(scene.client, scene.worker, submission("low", [1] * 20, max_tokens=3, priority=5))
    planned = scene.asker.plan([2] * 10, priority=0)
    assert (planned.outcome, planned.preempt) == ("wait_for_room", ("low",))
    scene.send(scene.client, submission("next", [3] * 20, priority=5, arrival=1.0))
    behind = scene.asker.plan([2] * 20, priority=6)
    assert (behind.outcome, behind.ahead) == ("wait_for_turn", 1)
    hidden = scene.asker.plan([2] * 20, priority=6, tenant=TENANTS[0])
    assert (hidden.outcome, hidden.ahead) == ("wait_for_turn", 0)


def test_one_block() -> None:
    scene = AskedScene()
    start, _ = scene.submit(scene.client, scene.worker, submission("second", [*TEXT, 1], max_tokens=1))
    scene.send(scene.worker, StepReport(sources_read=((start.start_id, 0),)))
    (block, generation), *_ = scene.asker.explain(TEXT).blocks[1:]
    scene.now = 2.0
    detail: BlockDetail = scene.asker.ask(BlockQuery(1, block))
    assert detail.block == (block, generation)
    assert (detail.state, detail.ref_count, detail.hits, detail.first_token) == ("SEALED", 1, 1, 4)
    assert (detail.token_ids, detail.children, detail.age) == ((104, 105, 106, 107), 1, 2.0)
    assert [(holder.kind, holder.name) for holder in detail.holders] == [("sequence", "second")]
    assert detail.parent_block == scene.asker.explain(TEXT).blocks[0][0]
    assert scene.asker.ask(BlockQuery(1, 99)).state == ""
    assert scene.asker.ask(BlockQuery(1, block, TENANTS[0])).state == ""


def test_ranks_are_those_of_eviction() -> None:
    scene = AskedScene(5)
    ranks = {block: scene.asker.ask(BlockQuery(1, block)).eviction_rank for block in range(5)}
    order = list(scene.pool.evictable())
    assert {block: rank for block, rank in ranks.items() if rank >= 0} == {b: i for i, b in enumerate(order)}


def test_requests_that_ended_lately_are_told() -> None:
    scene = AskedScene()
    start, _ = scene.submit(scene.client, scene.worker, submission("runs", [*TEXT, 3], max_tokens=4))
    first, runs = scene.asker.requests()
    assert (first.request_id, first.state, first.num_prompt_tokens) == ("first", "ended", 10)
    assert (runs.state, runs.runner, runs.num_choices) == ("running", "r", 1)
    assert runs.lookup is not None
    assert (runs.lookup.hit_blocks, runs.lookup.copied_tokens, runs.lookup.num_tokens) == (2, 2, 11)
    (sequence,) = runs.sequences
    assert (sequence.num_tokens, sequence.num_computed, sequence.num_blocks) == (11, 10, 3)
    (one,) = scene.asker.ask(RequestsQuery(1, "runs")).requests
    assert len(one.sequences[0].block_table) == 3
    scene.send(
        scene.worker,
        StepReport(progress=(Progress(start.start_id, 0, (), 11),), sources_read=((start.start_id, 0),)),
    )
    assert scene.asker.requests()[1].sequences[0].num_computed == 11


def test_so_many_of_all_that_ended_are_told_and_so_many_of_each_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvmanager.state.MAX_ENDED", 2)
    scene = AskedScene()
    for name, tenant in zip("abcdef", [TENANTS[0], TENANTS[0], TENANTS[0], "", TENANTS[1], ""], strict=True):
        message = submission(name, [1], arrival=float(ord(name)))
        scene.run(scene.client, scene.worker, msgspec.structs.replace(message, tenant=tenant))
    told = {
        tenant: [each.request_id for each in scene.asker.ask(RequestsQuery(1, tenant=tenant)).requests]
        for tenant in ("", *TENANTS)
    }
    assert told == {"": ["e", "f"], TENANTS[0]: ["b", "c"], TENANTS[1]: ["e"]}


@pytest.mark.parametrize(
    "question",
    [
        *(RequestsQuery(1, cursor=cursor) for cursor in ("9" * 5000, "-1", "x", "²", " 1")),
        RequestsQuery(1, limit=-5),
        *(BlocksQuery(1, first, limit) for first in (-9, 16, 1 << 62) for limit in (-1, 0, 1 << 62)),
        *(EventsQuery(1, "boot", after, -3) for after in (-1, 0, 1, 99, 1 << 62)),
        *(AuditQuery(1, first, limit) for first in (-9, 1 << 62) for limit in (-1, 1 << 62)),
        *(BlockQuery(1, block) for block in (-1, 16, 1 << 62)),
        *(PlanQuery(1, (1,), number, number, number) for number in (-1, 0, 1 << 62)),
        PlanQuery(1, (1,), 1, cache_salt="s" * 9999),
    ],
)
def test_odd_numbers_are_answered(question: Any) -> None:
    scene = AskedScene()
    answer = scene.asker.ask(question)
    assert decode_to_frontend(encode(answer)) == answer
    assert answer.at.boot_id == "boot"


@pytest.mark.parametrize(
    "message",
    [
        ExplainQuery(1, (-1,)),
        ExplainQuery(1, (1 << 32,)),
        ExplainQuery(1, (1,), tenant="no tenant"),
        PlanQuery(1, (1,), 1, tenant="AA" * 16),
        BlockQuery(1, 0, "aa" * 15),
    ],
)
def test_what_no_frontend_of_ours_asks_is_dropped(message: Any) -> None:
    scene = AskedScene()
    scene.received(scene.client)
    scene.send(scene.client, message)
    assert scene.received(scene.client) == []
    assert scene.core.state.counters.dropped_messages == 1


def test_a_submit_of_no_tenant_is_refused() -> None:
    assert tenant_fault("aa" * 16) == tenant_fault("") == ""
    assert "32 small hex digits" in tenant_fault("x")
    assert salt_digest("s", TENANTS[0])[:16] == bytes.fromhex(TENANTS[0])
    assert len({salt_digest("", TENANTS[0]), salt_digest("", TENANTS[1]), salt_digest("")}) == 3


def test_questions_and_answers_survive_the_wire() -> None:
    scene = AskedScene()
    for question in (ExplainQuery(1, tuple(TEXT)), PlanQuery(2, tuple(TEXT), 3), BlockQuery(3, 0)):
        assert decode_to_manager(encode(question)) == question
        answer = scene.asker.ask(question)
        assert decode_to_frontend(encode(answer)) == answer
