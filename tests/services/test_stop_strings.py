"""Stop strings against a naive search of the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.text.stop_strings import Piece, StopStrings

TEXT = st.text("ab\n<🎉", max_size=40)
STOPS = st.lists(st.text("ab\n<🎉", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text up to the first place where a stop string is complete (the longest that is)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each piece (and at the end), and the stop string."""
    matcher, shown = StopStrings(stops, include), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_a_stop_string_over_several_pieces_leaks_nothing() -> None:
    assert run(["one", " ST", "O", "P two"], ["STOP"]) == (["one", " ", "", ""], "STOP")


def test_text_that_only_begins_like_one_comes_out_in_full() -> None:
    assert run(["a ST", "ONE", " ST"], ["STOP"]) == (["a ", "STONE", " ", "ST"], None)


def test_exactly_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert StopStrings(["aab"]).push("xaaa") == Piece("xa")


def test_the_stop_string_is_shown_on_request() -> None:
    assert run(["one ST", "OP two"], ["STOP"], include=True) == (["one ST", "OP"], "STOP")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")


def test_of_two_that_end_together_the_longest_wins() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")


def test_before_enough_tokens_a_stop_string_is_ordinary_text() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("xaba", armed=False) == Piece("xab")
    assert matcher.push("b") == Piece("", "ab")


def test_no_stop_strings_hold_nothing_back() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_long_stop_string_costs_no_more_than_its_text() -> None:
    """Beginnings of beginnings: a search that compares every suffix would take minutes."""
    text = ("a" * 4999 + "c") * 40
    assert run([text], ["a" * 5000 + "b", "a" * 2500 + "d"]) == ([text, ""], None)


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
@example("abab<", ["ab<", "b<"], [1, 2, 3], False)
def test_pieces_together_are_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    shown, stop = run(cut(text, places), stops, include)
    assert ("".join(shown), stop) == naive(text, stops, include)


@given(TEXT, STOPS.filter(bool))
def test_what_is_held_back_is_the_longest_suffix_that_begins_a_stop_string(
    text: str, stops: list[str]
) -> None:
    piece = StopStrings(stops).push(text)
    if piece.stop is None:
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        suffixes = [text[start:] for start in range(len(text) + 1)]
        held = next((suffix for suffix in suffixes if suffix in beginnings), "")
        assert piece.text + held == text
