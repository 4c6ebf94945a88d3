"""The supervisor's decisions: restarts with back-off, giving up, stops stage by stage, all within bounds."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.supervisor.supervision import Action, Child, Finish, Policy, Send, Start, Supervision, Tell

POLICY = Policy(first_delay=1.0, longest_delay=4.0, healthy_after=10.0, quick_failures=3, grace=5.0)
CHILDREN = [
    Child("manager", 2),
    Child("runner", 1),
    Child("front-0", 0, drain=20.0),
    Child("front-1", 0, drain=20.0),
]


def acts(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Tell)]


def begun() -> Supervision:
    supervision = Supervision(CHILDREN, POLICY)
    assert supervision.begin(0.0) == [Start(child.name) for child in CHILDREN]
    return supervision


def test_a_dead_child_is_started_again_after_a_delay() -> None:
    supervision = begun()
    assert supervision.deadline is None
    assert acts(supervision.exited("runner", -9, 100.0)) == []
    assert supervision.deadline == 101.0
    assert supervision.tick(100.9) == []
    assert supervision.tick(101.0) == [Start("runner")]
    assert supervision.deadline is None


def test_a_child_that_was_asked_to_end_has_a_successor_at_once_however_often() -> None:
    supervision, now = begun(), 0.0
    for _ in range(3 * POLICY.quick_failures):
        assert acts(supervision.exited("runner", 0, now)) == []
        now += POLICY.first_delay
        assert supervision.deadline == now
        assert supervision.tick(now) == [Start("runner")]


def test_a_stuck_child_is_killed_and_told_of_but_not_once_all_stop() -> None:
    supervision = begun()
    actions = supervision.stuck("runner", 7.0)
    assert acts(actions) == [Send("runner", signal.SIGKILL)]
    assert Tell("runner", "has made no progress for 7 s: killed") in actions
    supervision.exited("runner", -9, 20.0)
    assert supervision.stuck("runner", 7.0) == []  # it is gone already
    supervision.stop(21.0)
    assert supervision.stuck("manager", 7.0) == []


def test_delays_double_to_a_limit_and_a_healthy_life_resets_them() -> None:
    policy = Policy(first_delay=1.0, longest_delay=4.0, healthy_after=10.0, quick_failures=9)
    supervision = Supervision(CHILDREN, policy)
    supervision.begin(0.0)
    now, delays = 0.0, []
    for life in (1.0, 1.0, 1.0, 1.0, 10.0, 1.0):
        now += life
        supervision.exited("runner", 1, now)
        assert supervision.deadline is not None
        delays.append(supervision.deadline - now)
        now = supervision.deadline
        assert supervision.tick(now) == [Start("runner")]
    assert delays == [1, 2, 4, 4, 1, 2]


def test_it_gives_up_after_quick_failures_and_names_the_child() -> None:
    supervision = begun()
    now = 0.0
    for _ in range(POLICY.quick_failures):
        supervision.exited("runner", 1, now)
        assert supervision.deadline is not None
        now = supervision.deadline
        supervision.tick(now)
    actions = supervision.exited("runner", 1, now)
    assert acts(actions) == [Send("front-0", signal.SIGTERM), Send("front-1", signal.SIGTERM)]
    assert "giving up" in " ".join(action.text for action in actions if isinstance(action, Tell))
    for name in ("front-0", "front-1", "manager"):
        actions = supervision.exited(name, 0, now)
    assert actions == [Finish(1, "runner")]


def test_a_configuration_error_is_not_tried_again() -> None:
    supervision = begun()
    assert supervision.exited("manager", 2, 1.0)[1:] == [
        Send("front-0", signal.SIGTERM),
        Send("front-1", signal.SIGTERM),
    ]
    for name in ("front-0", "front-1", "runner"):
        actions = supervision.exited(name, 0, 1.0)
    assert actions == [Finish(2, "manager")]


def test_a_stop_goes_stage_by_stage() -> None:
    supervision = begun()
    assert supervision.stop(0.0) == [Send("front-0", signal.SIGTERM), Send("front-1", signal.SIGTERM)]
    assert supervision.stopping
    assert supervision.exited("front-0", 0, 1.0) == []
    assert supervision.exited("front-1", 0, 2.0) == [Send("runner", signal.SIGTERM)]
    assert supervision.exited("runner", 0, 3.0) == [Send("manager", signal.SIGTERM)]
    assert supervision.exited("manager", 0, 4.0) == [Finish(0)]
    assert supervision.deadline is None
    assert supervision.tick(99.0) == supervision.stop(99.0) == []


def test_a_stage_that_takes_too_long_is_killed_and_at_last_left_behind() -> None:
    supervision = begun()
    supervision.stop(0.0)
    supervision.exited("front-0", 0, 1.0)
    assert supervision.deadline == 25.0  # its drain and the grace
    assert supervision.tick(24.0) == []
    assert supervision.tick(25.0) == [Send("front-1", signal.SIGKILL)]
    assert supervision.deadline == 30.0
    assert acts(supervision.tick(30.0)) == [Send("runner", signal.SIGTERM)]
    assert supervision.exited("front-1", -9, 31.0) == []  # it ended after all
    supervision.exited("runner", 0, 31.0)
    assert supervision.exited("manager", 0, 31.0) == [Finish(1)]


def test_a_second_stop_kills_all_at_once() -> None:
    supervision = begun()
    supervision.stop(0.0)
    assert supervision.stop(0.5) == [Send(child.name, signal.SIGKILL) for child in CHILDREN]
    for child in CHILDREN:
        actions = supervision.exited(child.name, -9, 0.6)
    assert actions == [Finish(0)]


def test_a_child_that_waits_for_its_restart_does_not_hold_up_a_stop() -> None:
    supervision = begun()
    for child in CHILDREN:
        supervision.exited(child.name, 1, 1.0)
    assert supervision.stop(1.5) == [Finish(0)]


def test_an_exit_of_a_child_that_does_not_run_is_a_mistake() -> None:
    supervision = begun()
    supervision.exited("runner", 1, 1.0)
    with pytest.raises(ValueError, match="runner"):
        supervision.exited("runner", 1, 1.0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_nothing_runs_at_the_end_and_the_end_comes_in_time(data: st.DataObject) -> None:
    """A naive world of processes: any may exit at any time, or ignore SIGTERM until it is killed."""
    supervision = Supervision(CHILDREN, POLICY)
    running: set[str] = set()
    finished: list[Finish] = []

    def apply(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    assert name not in running, "two processes of one child"
                    assert not supervision.stopping
                    running.add(name)
                case Send(name, number):
                    assert name in running
                    if number == signal.SIGKILL:
                        apply_exit(name, -9)
                case Finish():
                    assert not running
                    finished.append(action)

    def apply_exit(name: str, code: int) -> None:
        running.discard(name)
        apply(supervision.exited(name, code, now))

    now = 0.0
    apply(supervision.begin(now))
    for _ in range(data.draw(st.integers(0, 30))):
        now += data.draw(st.sampled_from([0.0, 0.5, 3.0, 12.0]))
        if running and data.draw(st.booleans()):
            apply_exit(data.draw(st.sampled_from(sorted(running))), data.draw(st.sampled_from([0, 1, -9])))
        else:
            apply(supervision.tick(now))
    stopped_at = now
    while not finished:
        if not supervision.stopping:
            apply(supervision.stop(now))
            stopped_at = now
        elif running and data.draw(st.booleans()):
            apply_exit(data.draw(st.sampled_from(sorted(running))), 0)
        else:
            assert supervision.deadline is not None
            now = max(now, supervision.deadline)
            apply(supervision.tick(now))
    assert len(finished) == 1
    assert now <= stopped_at + 25.0 + 5.0 + 5.0
