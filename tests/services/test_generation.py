"""Text of one choice, whatever the grouping of its tokens; and the signal that wakes its reader."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.generation import ChoiceStream, Signal
from services.text.detokenizer import Detokenizer
from services.text.stop_strings import StopStrings
from services.tracker import Output
from tests.services.fake_stack import served_model

TEXT = "stop and go 👩‍👩‍👧 stop"


def read_all(
    ids: list[int], groups: list[int], stops: list[str], finish: str = "length"
) -> tuple[str, Output]:
    """Feed `ids` in groups of the given sizes (the last one takes the rest); text is taken after each."""
    tokenizer = served_model().tokenizer
    output = Output(0)
    choice = ChoiceStream(output, Detokenizer(tokenizer), StopStrings(stops), served_model().eos_token_ids)
    text, rest = "", list(ids)
    for size in [*groups, len(ids)]:
        group, rest = rest[:size], rest[size:]
        output.token_ids.extend(group)
        if not rest and output.finish_reason is None:
            output.finish_reason = finish
        stop = choice.advance()
        text += choice.take()
        if stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
            break
    assert choice.closed
    assert choice.taken == choice.seen == len(output.token_ids)
    assert choice.length == len(text)
    return text, output


@given(
    groups=st.lists(st.integers(1, 6), max_size=30),
    stop=st.sampled_from([[], ["go"], ["o 👩"], ["zzz"], ["op and g"]]),
)
def test_any_grouping_gives_the_same_text(groups: list[int], stop: list[str]) -> None:
    ids = served_model().tokenizer.encode(TEXT)
    text, output = read_all(ids, groups, stop)
    expected = TEXT.split(stop[0])[0] if stop else TEXT
    assert text == expected
    assert output.stop_reason == (stop[0] if stop and stop[0] in TEXT else None)
    if output.stop_reason is not None:  # no token after the one that completed the stop string is left
        assert len(output.token_ids) < len(ids)


@given(st.integers(1, 40), st.lists(st.integers(1, 6), max_size=30))
def test_an_emoji_that_max_tokens_cuts_is_left_out(length: int, groups: list[int]) -> None:
    ids = served_model().tokenizer.encode(TEXT)[:length]
    text, output = read_all(ids, groups, ["zzz"])
    assert TEXT.startswith(text)
    assert output.token_ids == ids


def test_the_end_token_has_no_text() -> None:
    ids = [*served_model().tokenizer.encode("word"), served_model().eos_token_ids[0]]
    assert read_all(ids, [], [], "stop")[0] == "word"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = served_model().tokenizer.encode("👩")[:1]
    assert read_all(ids, [], [], "stop")[0] == "\ufffd"


def test_a_signal_is_kept_for_the_next_wait() -> None:
    async def run() -> list[bool]:
        signal = Signal()
        signal.wake()
        signal.wake()
        kept = await signal.wait(5)
        timed_out = await signal.wait(0.001)
        asyncio.get_running_loop().call_soon(signal.wake)
        return [kept, timed_out, await signal.wait(5)]

    assert asyncio.run(run()) == [True, False, True]


def test_a_cancelled_wait_leaves_the_signal_usable() -> None:
    async def run() -> bool:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        signal.wake()
        return await signal.wait(5)

    assert asyncio.run(run())
