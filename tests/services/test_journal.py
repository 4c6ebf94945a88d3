"""The ring of kept events and the state of a stream, against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.streams.journal import (
    EVENT_OVERHEAD,
    Batch,
    Dropped,
    JournalError,
    Progress,
    Ring,
    StreamSpec,
    StreamState,
)

SPEC = StreamSpec("cmpl-0", "/v1/completions", "", "", "model", 0.0, b"{}", ((1, 2),))


def ring(*events: bytes, room: int) -> Ring:
    """A ring with room for `room` bytes of events of one byte."""
    made = Ring(room * (1 + EVENT_OVERHEAD))
    for event in events:
        made.append(event)
    return made


def test_events_are_numbered_from_1() -> None:
    full = ring(b"a", b"b", b"c", room=9)
    assert (full.first, full.next) == (1, 4)
    assert full.since(0) == [b"a", b"b", b"c"]
    assert full.since(2) == [b"c"]
    assert full.since(3) == []


def test_the_oldest_events_go_and_asking_for_them_says_what_is_left() -> None:
    small = ring(b"a", b"b", b"c", b"d", room=2)
    assert (small.first, small.next) == (3, 5)
    assert small.since(2) == [b"c", b"d"]
    with pytest.raises(Dropped) as dropped:
        small.since(1)
    assert dropped.value.first == 3


def test_the_last_event_is_kept_however_long_it_is() -> None:
    small = ring(b"a", b"b" * 1000, room=2)
    assert small.since(1) == [b"b" * 1000]


@given(st.lists(st.binary(max_size=40)), st.integers(1, 500), st.integers(0, 60))
def test_a_ring_is_the_end_of_the_list(events: list[bytes], room: int, after: int) -> None:
    made = Ring(room)
    for event in events:
        made.append(event)
    assert made.next == len(events) + 1
    kept = events[made.first - 1 :]
    assert sum(len(event) + EVENT_OVERHEAD for event in kept) <= room or len(kept) == 1
    if after + 1 >= made.first:
        assert made.since(after) == events[after:]
    else:
        with pytest.raises(Dropped):
            made.since(after)


def batches(steps: list[tuple[int, int, int]]) -> list[Batch]:
    """Step (events, choice, tokens) → a batch; the last one ends its choice."""
    made, number = [], 1
    for index, (events, choice, tokens) in enumerate(steps):
        texts = tuple(b"event %d" % (number + k) for k in range(events))
        last = index == len(steps) - 1
        reason = "stop" if last else None
        progress = Progress(0, choice, tuple(range(tokens)), 7, reason, "END" if last else None)
        made.append(Batch(number, texts, (progress,), last))
        number += events
    return made


STEPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12)


@given(STEPS, st.integers(0, 12), st.integers(70, 600))
def test_a_snapshot_stands_for_all_before_it(steps: list[tuple[int, int, int]], cut: int, room: int) -> None:
    whole, before = StreamState(SPEC, room), StreamState(SPEC, room)
    for batch in batches(steps):
        whole.apply(batch)
    for batch in batches(steps)[:cut]:
        before.apply(batch)
    resumed = StreamState(SPEC, room)
    if before.ring.next > 1:
        resumed.apply(before.snapshot())
    for batch in batches(steps)[cut:]:
        resumed.apply(batch)
    assert resumed.choices == whole.choices
    assert (resumed.ring.first, resumed.ring.next, resumed.ended) == (whole.ring.first, whole.ring.next, True)
    assert resumed.ring.since(resumed.ring.first - 1) == whole.ring.since(whole.ring.first - 1)


def test_a_batch_that_does_not_follow_is_refused() -> None:
    state = StreamState(SPEC, 1000)
    state.apply(Batch(1, (b"a",)))
    with pytest.raises(JournalError, match="does not follow"):
        state.apply(Batch(3, (b"c",)))
