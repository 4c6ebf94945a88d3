"""The tracker: examples for each rule."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    Accepted,
    BeamPath,
    Cancel,
    Claimed,
    NotHeld,
    Rejected,
    RunnerLost,
    SamplingParams,
    SearchState,
    Submit,
    TokenBatch,
    TokenEvent,
)
from services.tracker import MAX_LOSSES, STOOD_STILL, Effects, Output, Request, Tracker

TIMEOUT = 10.0


def new_request(name: str = "r", choices: int = 1, arrival: float = 0.0) -> Request:
    sampling = SamplingParams(max_tokens=100, seed=1)
    return Request(name, (1, 2, 3), sampling, [Output(index) for index in range(choices)], arrival)


def connected(max_requests: int = 100) -> Tracker:
    tracker = Tracker(TIMEOUT, max_requests)
    tracker.connect(0.0)
    return tracker


def event(request: Request, position: int, ids: tuple[int, ...], **fields: Any) -> TokenEvent:
    values = {
        "request_id": request.request_id,
        "attempt": request.attempt,
        "choice": 0,
        "num_cached_tokens": 0,
    }
    return TokenEvent(**{**values, "position": position, "token_ids": ids, **fields})


def tokens(tracker: Tracker, *events: TokenEvent, now: float = 1.0) -> Effects:
    return tracker.tokens(now, TokenBatch(events))


def test_submit_goes_out_with_everything() -> None:
    request = new_request(choices=2)
    (message,) = connected().submit(0.0, request).send
    assert isinstance(message, Submit)
    assert (message.request_id, message.attempt, message.prompt_token_ids) == ("r", 0, (1, 2, 3))
    assert [choice.index for choice in message.choices] == [0, 1]


def test_tokens_in_order_and_the_end() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    assert tokens(tracker, event(request, 0, (7, 8), num_cached_tokens=2)).changed == [request]
    tokens(tracker, event(request, 2, (9,), finish_reason="stop", stop_reason=9))
    assert request.outputs[0].token_ids == [7, 8, 9]
    assert (request.outputs[0].finish_reason, request.outputs[0].stop_reason) == ("stop", 9)
    assert request.num_cached_tokens == 2
    assert request.done
    assert tracker.live == {}
    assert tracker.cancel(request).send == []


def test_what_came_twice_is_dropped() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tokens(tracker, event(request, 0, (7, 8)), event(request, 1, (8, 9)), event(request, 0, (7,)))
    assert request.outputs[0].token_ids == [7, 8, 9]


def test_a_gap_is_refused_and_asked_for_again() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tokens(tracker, event(request, 0, (7,)))
    (message,) = tokens(tracker, event(request, 2, (9,))).send
    assert isinstance(message, Submit)
    assert (message.attempt, message.choices[0].output_token_ids) == (1, (7,))


def test_another_attempt_is_not_ours() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tokens(tracker, event(request, 0, (7,), attempt=1), event(request, 0, (7,), request_id="x"))
    tokens(tracker, event(request, 0, (7,), choice=5), event(request, 0, (7,), choice=-1))
    tokens(tracker, event(request, -1, (7, 8)), event(request, 0, (-1,)), event(request, 0, (1 << 40,)))
    assert request.outputs[0].token_ids == []
    assert tracker.stale_events == 7


def test_what_the_runner_cannot_compute_fails_with_its_reason() -> None:
    tracker, request = connected(), new_request(choices=2)
    tracker.submit(0.0, request)
    effects = tokens(tracker, event(request, 0, (), finish_reason="error", error="no such token"))
    assert effects.changed == [request]
    assert request.error is not None
    assert (request.error.code, request.error.message) == ("invalid_request", "no such token")
    assert not tracker.live


def test_a_lost_runner_resubmits_only_what_is_unfinished() -> None:
    tracker, request = connected(), new_request(choices=2, arrival=0.5)
    tracker.submit(0.5, request)
    tokens(tracker, event(request, 0, (7,), finish_reason="stop"), event(request, 0, (8, 9), choice=1))
    assert tracker.heard(1.0, RunnerLost((("r", 4), ("x", 0)))).send == []
    (message,) = tracker.heard(1.0, RunnerLost((("r", 0),))).send
    assert isinstance(message, Submit)
    assert (message.attempt, message.arrival) == (1, 0.5)
    assert [(choice.index, choice.output_token_ids) for choice in message.choices] == [(1, (8, 9))]


def test_a_beam_search_is_submitted_again_with_where_it_stood() -> None:
    """As far as a runner has told, and never from an earlier place."""

    def told(*outputs: tuple[int, ...]) -> dict[str, Any]:
        return {"search": SearchState(tuple(BeamPath(output, -1.0) for output in outputs), ())}

    tracker, request = connected(), new_request(choices=2)
    tracker.submit(0.0, request)
    first = event(request, 0, (), num_cached_tokens=2, prompt_logprobs=(None,), **told((7, 8, 9), (7, 8, 1)))
    assert tokens(tracker, first).changed == []
    tokens(tracker, event(request, 0, (), num_cached_tokens=3, **told((7,), (8,))))
    assert (request.num_cached_tokens, request.prompt_logprobs) == (2, (None,))
    (message,) = tracker.heard(1.0, RunnerLost((("r", 0),))).send
    assert isinstance(message, Submit)
    assert message.search == first.search
    assert [(each.index, each.output_token_ids) for each in message.choices] == [
        (0, (7, 8, 9)),
        (1, (7, 8, 1)),
    ]
    for _ in range(MAX_LOSSES - 1):
        tracker.heard(1.0, RunnerLost((("r", request.attempt),)))
    tokens(tracker, event(request, 0, (), **told((7, 8, 9, 2), (7, 8, 9, 3))))
    assert request.losses == 0
    assert not request.outputs[0].token_ids


def test_what_goes_without_the_cache_has_it_again_once_its_prompt_was_answered() -> None:
    tracker, request = connected(), new_request()
    request.read_cache = False
    (first,) = tracker.submit(0.0, request).send
    (second,) = tracker.heard(1.0, RunnerLost((("r", 0),))).send
    tokens(tracker, event(request, 0, (7,)))
    (third,) = tracker.heard(1.0, RunnerLost((("r", 1),))).send
    submits = [message for message in (first, second, third) if isinstance(message, Submit)]
    assert [message.read_cache for message in submits] == [False, False, True]


def test_a_request_that_gets_on_between_two_deaths_is_not_given_up() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    for position in range(3 * MAX_LOSSES):
        tokens(tracker, event(request, position, (7,)))
        assert tracker.heard(1.0, RunnerLost((("r", request.attempt),))).send
    assert request.error is None


def test_a_request_that_runners_die_of_is_given_up() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    for attempt in range(MAX_LOSSES):
        assert len(tracker.heard(1.0, RunnerLost((("r", attempt),))).send) == 1
    effects = tracker.heard(1.0, RunnerLost((("r", MAX_LOSSES),)))
    assert effects.changed == [request]
    assert request.error is not None
    assert request.error.code == "internal"
    assert [type(message) for message in effects.send] == [Cancel]


def test_a_new_session_claims_what_may_run_and_submits_the_rest_oldest_first() -> None:
    tracker = Tracker(TIMEOUT, 100)
    late, early = new_request("late", arrival=2.0), new_request("early", arrival=1.0)
    assert tracker.submit(2.0, late).send == []
    tracker.submit(2.0, early)
    claimed, *first = tracker.connect(3.0).send
    assert (claimed, named(first)) == (Claimed(), [("early", 0, False), ("late", 0, False)])
    tracker.disconnect()
    new = new_request("new", arrival=4.0)
    assert tracker.submit(4.0, new).send == []
    *claims, claimed, fresh = tracker.connect(4.0).send
    assert (claimed, named(claims)) == (Claimed(), [("early", 0, True), ("late", 0, True)])
    assert named([fresh]) == [("new", 0, False)]
    assert tracker.heard(5.0, Accepted("early", 0)).send == []
    again = tracker.heard(5.0, NotHeld((("late", 0), ("gone", 0), ("early", 7)))).send
    assert named(again) == [("late", 1, False)]
    assert late.losses == 0


def named(messages: Sequence[object]) -> list[tuple[str, int, bool]]:
    submits = [message for message in messages if isinstance(message, Submit)]
    assert len(submits) == len(messages)
    return [(submit.request_id, submit.attempt, submit.claim) for submit in submits]


def test_what_was_refused_for_now_is_not_claimed() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tracker.heard(1.0, RunnerLost((("r", 0),)))
    tracker.heard(2.0, Rejected("r", 1, "queue_full", "full", 9.0))
    tracker.disconnect()
    claimed, again = tracker.connect(3.0).send
    assert (claimed, named([again])) == (Claimed(), [("r", 2, False)])


def test_rejected_at_once_and_after_a_resubmission() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    effects = tracker.heard(1.0, Rejected("r", 0, "queue_full", "full", 2.0))
    assert (effects.changed, effects.send) == ([request], [])
    assert request.error is not None
    assert (request.error.code, request.error.retry_after) == ("queue_full", 2.0)
    resumed = new_request("resumed")
    tracker.submit(1.0, resumed)
    tracker.heard(1.0, RunnerLost((("resumed", 0),)))
    assert tracker.heard(1.0, Rejected("resumed", 1, "queue_full", "full", 2.0)).changed == []
    assert tracker.tick(2.9).send == []
    (message,) = tracker.tick(3.0).send
    assert (message.request_id, message.attempt) == ("resumed", 2)


def test_every_wait_for_the_manager_is_bounded() -> None:
    absent = Tracker(TIMEOUT, 100)
    request = new_request()
    absent.submit(0.0, request)
    assert absent.tick(STOOD_STILL).changed == []
    assert absent.tick(TIMEOUT).changed == []
    assert absent.tick(TIMEOUT + 0.1).changed == [request]
    assert request.error is not None
    assert (request.error.code, request.error.retry_after) == ("manager_absent", 1.0)
    assert absent.connect(20.0).send == [Claimed()]


def test_after_standing_still_everything_is_submitted_again() -> None:
    """A runner may have dropped what this process did not take, the last token too."""
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tokens(tracker, event(request, 0, (5,)))
    assert tracker.tick(1.0) == Effects()
    (message,) = tracker.tick(1.0 + STOOD_STILL + TIMEOUT).send
    assert isinstance(message, Submit)
    assert (message.attempt, message.choices[0].output_token_ids) == (1, (5,))
    assert not request.done


def test_standing_still_before_the_first_tick_is_noticed_too() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(100.0, request)
    (message,) = tracker.tick(100.0 + STOOD_STILL + 1.0).send
    assert isinstance(message, Submit)
    assert message.attempt == 1


def test_after_standing_still_without_a_manager_the_wait_begins_anew() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tracker.disconnect()
    tracker.tick(0.0)
    later = STOOD_STILL + TIMEOUT
    assert tracker.tick(later) == Effects()
    tracker.tick(later + STOOD_STILL)
    assert tracker.tick(later + TIMEOUT) == Effects()
    assert tracker.tick(later + TIMEOUT + 0.1).changed == [request]


def test_an_accepted_request_waits_as_long_as_the_manager_lives() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tracker.heard(0.0, Accepted("r", 0))
    tracker.tick(4.0)
    for now in range(0, 100, 5):
        tracker.heard(float(now), None)
        assert tracker.tick(now + 9.0).changed == []
    assert tracker.tick(95 + TIMEOUT + 0.1).changed == [request]
    assert request.error is not None


def test_a_request_that_produces_lives_on_without_the_manager() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    for now in range(0, 60, 5):
        tokens(tracker, event(request, now // 5, (7,)), now=float(now))
        assert tracker.tick(float(now)).changed == []


def test_cancel_names_the_attempt() -> None:
    tracker, request = connected(), new_request()
    tracker.submit(0.0, request)
    tracker.heard(1.0, RunnerLost((("r", 0),)))
    assert tracker.cancel(request).send == [Cancel("r", 1)]
    assert tracker.cancel(request).send == []
    assert Tracker(TIMEOUT, 1).cancel(new_request()).send == []


def test_a_stop_ends_a_choice_and_the_last_one_the_request() -> None:
    tracker, request = connected(), new_request(choices=2)
    tracker.submit(0.0, request)
    tokens(tracker, event(request, 0, (7, 8)))
    assert tracker.stop(request, 0, "x").send == []
    tokens(tracker, event(request, 2, (9,)), event(request, 5, (9,)))
    assert request.outputs[0].token_ids == [7, 8]
    assert tracker.stop(request, 1, "y").send == [Cancel("r", 0)]


def test_the_limit_is_named() -> None:
    tracker = connected(max_requests=1)
    tracker.submit(0.0, new_request("a"))
    with pytest.raises(PagekeeperError, match="1 requests, its limit") as refused:
        tracker.submit(0.0, new_request("b"))
    assert refused.value.code == "queue_full"
