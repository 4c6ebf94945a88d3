"""The ring of events: numbers, bounds, gaps, and what is remembered of what is gone."""

from kvmanager.asking.event_log import NOBODY, ON_DISK, REMOVED, Asker, EventLog
from kvmanager.pool.hashing import Content


def held(number: int) -> Content:
    return Content(bytes([number]), b"parent", b"salt", b"tokens")


def filled(size: int, stored: int) -> EventLog:
    """Contents 0, 1 … stored one after the other."""
    log = EventLog(size)
    for number in range(stored):
        log.now = float(number)
        log.stored(held(number), number)
    return log


def test_events_are_numbered_and_read_in_parts() -> None:
    log = filled(8, 5)
    assert [event.sequence for event in log.since(0, 99)] == [1, 2, 3, 4, 5]
    first, second = log.since(1, 2)
    assert (first.sequence, first.kind, first.tier, first.time) == (2, "stored", "pool", 1.0)
    assert (first.block_hash, first.parent_hash, first.tokens, first.salt) == (
        b"\1",
        b"parent",
        b"tokens",
        b"salt",
    )
    assert (second.block, second.cause, second.request_id) == (2, "", "")
    assert log.since(5, 9) == []


def test_what_the_ring_no_longer_has_is_a_gap() -> None:
    log = filled(4, 10)
    assert [log.has(after) for after in (-1, 0, 5, 6, 9, 10, 11)] == [False] * 3 + [True] * 3 + [False]
    assert [event.sequence for event in log.since(6, 99)] == [7, 8, 9, 10]
    assert not EventLog(4).has(-1)
    assert EventLog(4).has(0)


def test_a_removal_knows_its_cause_and_for_whom_it_was() -> None:
    log = filled(8, 2)
    log.now, log.asker = 9.0, Asker("request", b"salt of it")
    log.removed(held(0), 0)
    log.asker, log.cause = NOBODY, "evict"
    log.removed(held(1), 1, REMOVED | ON_DISK)
    removal = log.removal(b"\0")
    assert removal is not None
    assert (removal.time, removal.cause, removal.request_id) == (9.0, "capacity", "request")
    assert log.asker_of(removal) == ("request", b"salt of it")
    other = log.removal(b"\1")
    assert other is not None
    assert (other.tier, other.cause, other.request_id, log.asker_of(other)) == ("disk", "evict", "", NOBODY)
    assert log.removal(b"\2") is None


def test_the_last_removal_counts_and_old_ones_are_forgotten() -> None:
    log = EventLog(4)
    for number in range(100):
        log.now = float(number)
        log.removed(held(number % 3), number)
        log.trim()
    removal = log.removal(bytes([99 % 3]))
    assert removal is not None
    assert removal.time == 99.0
    assert sum(map(len, log._removals)) <= 6
    for number in range(4):
        log.stored(held(200 + number), 0)
    assert log.removal(bytes([99 % 3])) is None
    log.cleared()
    assert log.since(log.last - 1, 1)[0].kind == "cleared"


def test_what_a_burst_of_removals_removed_is_known_for_as_long_as_the_ring_has_it() -> None:
    log = EventLog(64)
    for number in range(64):
        log.removed(held(number), number)
    while log.behind:
        log.catch_up(8)
        log.trim()
    assert None not in [log.removal(bytes([number])) for number in range(64)]
    for number in range(64, 192):
        log.removed(held(number), number)
        log.catch_up(8)
        log.trim()
    assert [log.removal(bytes([number])) is None for number in range(192)] == [True] * 128 + [False] * 64
    assert sum(map(len, log._removals)) <= 128
