"""Messages that come too late: of an old incarnation, to a manager that has restarted, for an old request."""

import signal

from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Directives,
    Ended,
    Fenced,
    FrontendHello,
    Progress,
    Session,
    StepReport,
    decode_to_runner,
    encode,
)
from tests.kvmanager.fake_clients import submission
from tests.kvmanager.scene import Scene
from tests.kvmanager.test_server import DEADLINE, Daemon, stats_when, wait_for
from tests.kvmanager.test_server import daemon as daemon


def test_a_late_step_report_of_an_old_incarnation_is_answered_fenced_and_changes_nothing(
    daemon: Daemon,
) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        frontend.send(submission("a", [1] * 9))
        start = wait_for(runner, Directives).starts[0]
        old = encode(runner.session)
        runner.connect(DEADLINE)
        runner.send(StepReport())
        before = stats_when(frontend, lambda stats: stats.pool.free == stats.pool.num_blocks)
        late = StepReport(progress=(Progress(start.start_id, 0, (), 9),), credits_wanted=3)
        runner.socket.send_multipart([old, encode(late)])
        assert runner.socket.poll(int(DEADLINE * 1000))
        session, body = runner.socket.recv_multipart()
        assert session == old
        assert isinstance(decode_to_runner(body), Fenced)
        after = stats_when(frontend, lambda stats: True)
        assert (after.pool, after.running, after.dropped_messages) == (before.pool, 0, 0)
        runner.send(StepReport())
        stats_when(frontend, lambda stats: len(stats.runners) == 1)  # the new session stands


def test_a_manager_that_restarts_faster_than_anyone_polls_is_noticed_by_its_boot_id(daemon: Daemon) -> None:
    with daemon.runner() as runner, daemon.frontend() as frontend:
        sessions = [client.session for client in (runner, frontend)]
        daemon.stop(signal.SIGKILL)
        daemon.start()  # both clients have sent nothing since, and their sockets connect again by themselves
        for client, old in zip((runner, frontend), sessions, strict=True):
            assert isinstance(old, Session)
            assert wait_for(client, Fenced).boot_id != old.boot_id
            assert client.session is None


def test_a_late_cancel_for_an_old_request_whose_id_is_used_again_does_not_touch_the_new_one() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    start, _ = scene.submit(frontend, runner, submission("a", [1] * 3))
    again = scene.hello(FrontendHello(PROTOCOL_VERSION, "f", "f", "ipc:///another"))  # it has started again
    assert scene.received(runner)[0].cancels == (start.start_id,)
    new, _ = scene.submit(again, runner, submission("a", [1] * 3))
    assert scene.received(again) == [Accepted("a", 0)]
    assert frontend in scene.ended  # what comes under the old session is fenced before the core sees it
    scene.end(runner, start, 3, "cancelled")
    scene.send(again, Cancel("a", -1))
    scene.send(again, Cancel("a", 1))
    assert not scene.received(runner)
    assert list(scene.core.state.runners[0].active) == [new.start_id]
    scene.send(runner, StepReport(ended=(Ended(new.start_id, 0, (1,), 3, "finished"),)))
    newer, _ = scene.submit(again, runner, submission("b", [1] * 4))
    scene.send(again, Cancel("a", 0))  # the client's own, come late
    assert not scene.received(runner)
    assert list(scene.core.state.runners[0].active) == [newer.start_id]
