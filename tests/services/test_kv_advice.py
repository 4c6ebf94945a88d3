"""What explain says: where the texts differ, and what would help."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvmanager.protocol import At, Eviction, Explanation, Sibling
from services.kv.advice import advise, difference, find_cause

SIZE = 16


def text(tokens: Sequence[int]) -> str:
    """A token is a character."""
    return "".join(map(chr, tokens))


def explain(yours: str, cached: str = "", **fields: Any) -> Explanation:
    """As a cache that holds `cached`, in blocks of SIZE characters, answers about `yours`."""
    shared = next((i for i, (a, b) in enumerate(zip(yours, cached, strict=False)) if a != b), len(cached))
    full = shared // SIZE
    piece = cached[full * SIZE : (full + 1) * SIZE]
    sibling = Sibling((7, 1), tuple(map(ord, piece)), shared - full * SIZE) if piece else None
    values = {
        "num_cached_tokens": shared,
        "blocks": tuple((i, 1) for i in range(full)),
        "reason": "partial" if sibling else "never_seen",
        "sibling": sibling,
        **fields,
    }
    return Explanation(
        query_id=0, at=At("b", 1), num_tokens=len(yours), block_size=SIZE, tier_blocks=0, **values
    )


def said(yours: str, cached: str = "", *, hints: dict[str, Any] | None = None, **fields: Any) -> str:
    """The advice; `hints` are what the route knows besides."""
    explanation, tokens = explain(yours, cached, **fields), list(map(ord, yours))
    found = difference(explanation, tokens, text)
    return advise(explanation, found, tokens, text, **(hints or {}))


def test_a_time_that_differs_is_named_with_both_sides_and_what_it_costs() -> None:
    yours, cached = "It is 10:42 now. " + "x" * 60, "It is 10:41 now. " + "x" * 60
    explanation, tokens = explain(yours, cached), list(map(ord, yours))
    found = difference(explanation, tokens, text)
    assert found is not None
    assert (found.token, found.block_index, found.offset_in_block, found.shared_tokens) == (10, 0, 10, 10)
    assert (found.before, found.yours.text, found.cached.text) == ("It is 10:4", "2 now.", "1 now.")
    assert (found.yours.token_ids, found.cached.block) == (list(map(ord, "2 now.")), 7)
    assert said(yours, cached) == (
        "Token 10 differs: yours has '10:42', the cached text '10:41', probably a time of day; its block and "
        "the 4 after it change, so 67 of 77 tokens are computed. Move what varies to the end of the prompt."
    )


@pytest.mark.parametrize(
    ("yours", "cached", "kind"),
    [
        ("at 2026-11-30T17:02:51Z.", "at 2026-11-30T17:02:5", "a time stamp"),
        ("at 2026-11-30 17:02, so", "at 2026-11-30 16:59", "a time stamp"),
        ("Today: 2026-11-30.", "Today: 2026-11-29.", "a date"),
        ("Today: 30.11.2026.", "Today: 29.11.2026.", "a date"),
        ("Today: 30 Nov 2026", "Today: 29 Nov 2026", "a date"),
        ("Today: November 30", "Today: December 1", "a date"),
        ("Hello. Monday it is", "Hello. Tuesday it", "a date"),
        ("id 0b7fd3c4-9a1e-4d", "id 91c0ffee-1234-4", "an identifier (UUID)"),
        ("id 0b7fd3c49a1e4d5f", "id 91c0ffee12344", "an identifier"),
        ("session_0123456789abcdefg", "session_9", "an identifier"),
        ("It is 23:42. Good", "It is 23:41. Good", "a time of day"),
        ("User 17 asks", "User 18 asks", "a number"),
        ("User 17 asks", "User 1", "a number"),
        ("User 17 asks", "User 1 asks", "a number"),
        ("Dear Anna, hello", "Dear Bert, hello", ""),
        ("1 apple", "one apple", ""),
    ],
)
def test_what_varies_is_recognised(yours: str, cached: str, kind: str) -> None:
    explanation, tokens = explain(yours, cached[: SIZE * 2]), list(map(ord, yours))
    found = difference(explanation, tokens, text)
    assert found is not None
    cause = find_cause(found, tokens, text)
    assert cause.kind == kind
    assert not cause.yours.endswith((".", ","))


def test_a_difference_without_a_cause_and_one_in_the_system_prompt() -> None:
    yours, cached = "You are Anna. " + "x" * 20, "You are Bert. " + "x" * 20
    assert said(yours, cached) == (
        "Token 8 differs: yours has 'A', the cached text 'B'; its block and the 2 after it change, so 26 of "
        "34 tokens are computed. What requests have in common is reused only if it comes first."
    )
    assert "in the system prompt, yours has 'A'" in said(yours, cached, hints={"in_system_prompt": True})
    assert "Another system prompt shares nothing from there on" in said(
        yours, cached, hints={"in_system_prompt": True}
    )
    last = said("x" * 20 + "a" * 12, "x" * 20 + "b" * 12)
    assert "its block, the last one, changes, so 12 of 32 tokens" in last


def test_a_character_that_differs_in_its_last_byte_is_shown_whole() -> None:
    def of_bytes(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    yours, cached = (f"Fly {sign} higher".encode() for sign in "🎈🎉")
    explanation = explain(yours.decode("latin-1"), cached.decode("latin-1"))
    found = difference(explanation, list(yours), of_bytes)
    assert found is not None
    cause = find_cause(found, list(yours), of_bytes)
    assert (cause.yours, cause.cached, cause.kind) == ("🎈", "🎉", "")


def test_where_the_cached_text_ends_and_where_it_never_began() -> None:
    assert (
        said("x" * 40, "x" * 20)
        == "20 of 40 tokens are cached. What is cached ends there: 20 tokens are new."
    )
    assert said("y" * 40, "x" * 20).startswith("Nothing that begins like it is cached: the very first token")
    assert said("y" * 40) == (
        "Nothing like it is cached: the first request computes all 40 tokens, later ones reuse them."
    )
    assert said("y" * 40, hints={"salt": "s"}).startswith("Nothing like it is cached under this cache_salt")
    assert said("y" * 9).startswith("The prompt has 9 tokens, a block 16")
    assert said("x" * 48, num_cached_tokens=32, blocks=((1, 1), (2, 1))) == (
        "32 of 48 tokens are cached. What follows was never computed: 16 tokens are new."
    )
    assert said("x" * 40, num_cached_tokens=32, blocks=((1, 1), (2, 1))) == (
        "32 of 40 tokens are cached. The rest, less than a block, is not: 8 tokens are computed."
    )
    for salt, own in (("", "without a cache_salt"), ("s", "under this cache_salt")):
        elsewhere = said("y" * 40, hints={"salt": salt, "elsewhere": True})
        assert elsewhere.startswith(
            f"Nothing of it is cached {own}, but its first 16 tokens are under another"
        )
    assert said("y" * 40, hints={"salt": "s", "unsalted_tokens": 32}).startswith(
        "Nothing of it is cached under this cache_salt, but 32 of 40 tokens are without a salt"
    )


def test_the_other_reasons() -> None:
    assert said("x" * 40, reason="hit", num_cached_tokens=39).startswith(
        "39 of 40 tokens are cached: all but"
    )
    busy = said("x" * 40, reason="being_computed", computed_by="cmpl-1-0")
    assert busy.startswith("None of 40 tokens is cached. cmpl-1-0 computes the next block right now")
    assert "another model, dtype or block size" in said("x" * 40, reason="other_layout")
    some = {"num_cached_tokens": 16, "blocks": ((1, 1),), "reason": "evicted"}
    assert said("x" * 40, eviction=Eviction(12.4, "capacity", "cmpl-2-0"), **some) == (
        "16 of 40 tokens are cached. The block from token 16 on was evicted 12 s ago for the room of "
        "cmpl-2-0, so 24 tokens are to be computed again: a pin (POST /kv/pins), a larger pool (pool_bytes) "
        "or a disk tier keeps it."
    )
    assert "was evicted just now for the room, so" in said(
        "x" * 40, eviction=Eviction(0.2, "capacity"), **some
    )
    assert "was dropped 3 s ago by POST /kv/clear" in said("x" * 40, eviction=Eviction(3, "clear"), **some)
    assert "could not be read back just now; 24" in said("x" * 40, eviction=Eviction(0, "damaged"), **some)
    assert "dropped 3 s ago for another model" in said("x" * 40, eviction=Eviction(3, "other_layout"), **some)


def test_no_difference_where_all_of_it_is_cached_or_nothing_is_near() -> None:
    assert difference(explain("x" * 40), [1] * 40, text) is None
    assert difference(explain("x" * 20, "x" * 30, num_cached_tokens=19, reason="hit"), [1] * 20, text) is None
