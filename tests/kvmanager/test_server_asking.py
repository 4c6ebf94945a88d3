"""The daemon asked over real sockets, and followed by a router of vLLM's kind over a restart."""

import random
from pathlib import Path

import pytest

from kvmanager.client import ManagerClient
from kvmanager.event_publisher import short
from kvmanager.protocol import (
    BlocksPage,
    BlocksQuery,
    Cleared,
    Directives,
    Ended,
    EventsPage,
    EventsQuery,
    Evict,
    ExplainQuery,
    Explanation,
    Layout,
    Start,
    StepReport,
)
from tests.kvmanager.fake_clients import LAYOUT, submission
from tests.kvmanager.test_event_publisher import Router
from tests.kvmanager.test_server import Daemon, daemon, stats_when, wait_for

__all__ = ["daemon"]
TEXT = list(range(100, 112))  # three full blocks


def compute(name: str, prompt: list[int], runner: ManagerClient, frontend: ManagerClient) -> None:
    frontend.send(submission(name, prompt, max_tokens=1))
    start: Start = wait_for(runner, Directives, lambda message: message.starts).starts[0]
    runner.send(StepReport(ended=(Ended(start.start_id, 0, (), len(prompt), "finished"),)))
    stats_when(frontend, lambda stats: stats.running == 0)


def explain(frontend: ManagerClient, tokens: list[int]) -> Explanation:
    frontend.send(ExplainQuery(1, tuple(tokens)))
    answer: Explanation = wait_for(frontend, Explanation)
    return answer


def hashes(frontend: ManagerClient) -> set[int]:
    """Of all full blocks that are found, as routers know them."""
    frontend.send(BlocksQuery(2, content=True))
    page: BlocksPage = wait_for(frontend, BlocksPage)
    return {short(digest) for digest, size in zip(page.hashes, page.num_tokens, strict=True) if size == 4}


def router(directory: str) -> Router:
    sockets = Path(directory) / "sockets"
    assert {path.stat().st_mode & 0o777 for path in sockets.iterdir()} == {0o600}
    return Router(
        f"ipc://{sockets}/events.sock", f"ipc://{sockets}/replay.sock", random.Random(1), lambda: None
    )


def test_questions_events_and_commands(daemon: Daemon) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        compute("first", TEXT, runner, frontend)
        said = explain(frontend, TEXT)
        assert (said.reason, said.num_cached_tokens) == ("hit", 11)
        frontend.send(EventsQuery(3, said.at.boot_id))
        page: EventsPage = wait_for(frontend, EventsPage)
        assert [event.kind for event in page.events] == ["stored"] * 3
        assert page.at == said.at
        frontend.send(Evict(4, tuple(TEXT[:8])))
        done: Cleared = wait_for(frontend, Cleared)
        assert done.evicted == 2
        after = explain(frontend, TEXT)
        assert (after.reason, after.num_cached_tokens) == ("evicted", 4)
        assert after.eviction is not None
        assert (after.eviction.cause, after.eviction.seconds_ago < 60) == ("evict", True)


def test_a_router_follows_over_a_restart(daemon: Daemon) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        compute("before", [7] * 4, runner, frontend)
        follower = router(daemon.directory)
        follower.catch_up()
        assert follower.found == hashes(frontend)
        compute("first", TEXT, runner, frontend)
        follower.read(0.0)
        follower.catch_up()
        assert len(follower.found) == 4
        assert follower.found == hashes(frontend)
    assert daemon.stop()[0] == 0
    assert not list((Path(daemon.directory) / "sockets").iterdir())
    daemon.start()
    with daemon.runner() as runner, daemon.frontend() as frontend:
        frontend.send(Evict(4, tuple(TEXT[:8])))
        wait_for(frontend, Cleared)
        follower.catch_up()
        assert len(follower.found) == 2
        assert follower.found == hashes(frontend)
    follower.close()


def test_no_events_are_published_where_they_are_off(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("--kv-events-endpoint=off")
    with daemon.runner():
        assert [path.name for path in (Path(daemon.directory) / "sockets").iterdir()] == ["manager.sock"]


@pytest.mark.parametrize("layout", [Layout("another", "float32", 4, 1, 1, 2)])
def test_what_another_model_had_is_known(daemon: Daemon, layout: Layout) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        compute("first", TEXT, runner, frontend)
    daemon.stop()
    daemon.start("--reset-pool")
    with daemon.runner(layout=layout), daemon.frontend() as frontend:
        said = explain(frontend, TEXT)
        assert (said.reason, said.num_cached_tokens) == ("other_layout", 0)
    assert layout != LAYOUT
