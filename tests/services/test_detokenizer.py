"""Streamed text: nothing is taken back, nothing is shown in part, and all of it is the whole text."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.text import gguf_tokenizer
from services.text.detokenizer import Detokenizer
from services.text.tokenizer import Tokenizer
from tests.services.tokenizer_samples import packaged_tokenizer, sentencepiece_metadata, tokenizer_of

EMOJI = [
    "🎉",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪",
    "e\u0301\u0323",
    "漢字",
    "\x07",
    " ",
    "\n\n",
    "abc",
    "<|im_end|>",
]
# Whole characters (no half of a surrogate pair), and of those what SmolLM2 has bytes for.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd", max_codepoint=0x3FFFF)
TEXT = st.lists(st.sampled_from(EMOJI) | st.text(CHARACTERS, max_size=3), max_size=12).map("".join)
PIECES = ["▁", "a", "b", "▁a", "ab", "▁ab"]


@cache
def pieces_tokenizer() -> Tokenizer:
    """A SentencePiece vocabulary: one leading space is stripped, and bytes spell what is in no piece."""
    return tokenizer_of(gguf_tokenizer.build(sentencepiece_metadata(PIECES)))


def stream(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None
) -> list[str]:
    """What each token shows, and what the end shows."""
    detokenizer = Detokenizer(tokenizer, skip, prompt or [])
    return [*(detokenizer.push([id]) for id in ids), detokenizer.finish()]


def test_an_emoji_over_several_tokens_comes_whole() -> None:
    ids = packaged_tokenizer().encode("Hi 🎉!", add_special_tokens=False)
    shown = stream(packaged_tokenizer(), ids)
    assert [text for text in shown if text] == ["Hi", " ", "🎉", "!"]


def test_bytes_that_are_no_character_show_at_the_end_only() -> None:
    ids = packaged_tokenizer().encode("a🎉")[:-1]
    shown = stream(packaged_tokenizer(), ids)
    assert (shown[0], shown[1:-1], shown[-1]) == ("a", [""] * (len(ids) - 1), "\ufffd")


def test_bytes_that_turn_out_wrong_show_with_the_next_token() -> None:
    tokenizer = packaged_tokenizer()
    first, letter = tokenizer.encode("🎉")[0], tokenizer.encode("x")[0]
    assert stream(tokenizer, [first, letter]) == ["", "\ufffdx", ""]


def test_a_replacement_character_that_the_model_wrote_is_shown() -> None:
    ids = packaged_tokenizer().encode("a\ufffdb")
    shown = stream(packaged_tokenizer(), ids)
    assert "".join(shown[:-1]) == "a\ufffdb"


def test_special_tokens_are_shown_on_request() -> None:
    ids = packaged_tokenizer().encode("a<|im_end|>")
    assert stream(packaged_tokenizer(), ids) == ["a", "", ""]
    assert stream(packaged_tokenizer(), ids, skip=False) == ["a", "<|im_end|>", ""]


def test_only_text_that_starts_loses_its_leading_space() -> None:
    tokenizer = pieces_tokenizer()
    word = tokenizer.encode("ab", add_special_tokens=False)
    assert stream(tokenizer, word + word) == ["ab", " ab", ""]
    assert stream(tokenizer, word, prompt=word) == [" ab", ""]
    assert stream(tokenizer, word, prompt=[1]) == ["ab", ""]
    assert stream(tokenizer, word, prompt=[1], skip=False) == [" ab", ""]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode("Hi 🎉!")
    prompt, output = ids[:3], ids[3:]
    assert "".join(stream(tokenizer, output, prompt=prompt)) == "🎉!"


def test_offsets_count_the_characters_before_each_token() -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode("Hi 🎉!")
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(ids)
    assert text == "Hi 🎉!"
    parts = len(ids) - 2  # tokens of " 🎉": the first has the space, all others are in the emoji
    assert detokenizer.text_offsets == [0, 2, *[3] * (parts - 1), 4]


def check(tokenizer: Tokenizer, ids: list[int], skip: bool, sizes: list[int]) -> None:
    """Any grouping of tokens shows the whole text, in steps that are never taken back."""
    detokenizer, shown, at = Detokenizer(tokenizer, skip), "", 0
    whole = tokenizer.decode(ids, skip)
    for size in [*sizes, len(ids)]:
        shown += detokenizer.push(ids[at : at + size])
        at += size
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


@given(TEXT, st.lists(st.integers(1, 4), max_size=20), st.booleans())
@example("".join(EMOJI), [1] * 100, True)
def test_streamed_text_is_the_whole_text(text: str, sizes: list[int], skip: bool) -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode(text)
    check(tokenizer, ids, skip, sizes)
    shown = stream(tokenizer, ids, skip)
    assert "\ufffd" not in "".join(shown)


@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(1, 4), max_size=9), st.booleans())
def test_any_tokens_stream_as_they_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    check(packaged_tokenizer(), ids, skip, sizes)


@given(st.lists(st.integers(0, 266), max_size=30), st.lists(st.integers(1, 4), max_size=9), st.booleans())
def test_any_pieces_stream_as_they_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    check(pieces_tokenizer(), ids, skip, sizes)


@pytest.mark.parametrize("tokenizer", [packaged_tokenizer, pieces_tokenizer])
@given(data=st.data())
def test_prompt_and_output_together_are_the_whole_text(tokenizer: object, data: st.DataObject) -> None:
    chosen = tokenizer() if callable(tokenizer) else None
    assert isinstance(chosen, Tokenizer)
    ids = data.draw(st.lists(st.integers(0, chosen.vocab_size - 1), max_size=20))
    cut = data.draw(st.integers(0, len(ids)))
    prompt = Detokenizer(chosen)
    before = prompt.push(ids[:cut])
    assert before + "".join(stream(chosen, ids[cut:], prompt=ids[:cut])) == chosen.decode(ids)


@given(TEXT)
def test_offsets_are_the_length_of_what_was_shown_before(text: str) -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode(text)
    detokenizer, shown, expected = Detokenizer(tokenizer), 0, []
    for id in ids:
        expected.append(shown)
        shown += len(detokenizer.push([id]))
    assert detokenizer.text_offsets == expected
