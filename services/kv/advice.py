"""What made a prompt miss the cache, in a sentence with numbers, and what would help. No I/O."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.protocol import Explanation
from services.kv.answers import CachedSide, Difference, Side

Text = Callable[[Sequence[int]], str]
"""Token ids as text."""

CONTEXT_TOKENS: Final = 64  # looked at on either side of a difference
BEFORE_CHARS: Final = 200
SHOWN_CHARS: Final = 60
UNREADABLE: Final = "\ufffd"

_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY: Final = r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
_CAUSES: Final = (
    ("an identifier (UUID)", r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]*"),
    ("a time stamp", r"\d{4}-\d\d-\d\d[T ]+\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"),
    ("a date", r"\d{4}[-/]\d\d?[-/]\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"),
    ("a date", rf"\d{{1,2}}\.? {_MONTH}\.?(?:,? \d{{2,4}})?|{_MONTH}\.? \d{{1,2}}(?:,? \d{{4}})?|{_DAY}"),
    ("a time of day", r"\d\d?:\d\d(?::\d\d)?(?:\.\d+)?(?: ?[AaPp][Mm]\b)?"),
    ("an identifier", r"\b(?=[a-zA-Z_-]*\d)[0-9a-zA-Z_-]{16,}|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"),
    ("a number", r"\d+(?:[.,]\d+)*"),
)
CAUSES: Final = tuple((name, re.compile(pattern)) for name, pattern in _CAUSES)


@dataclass(frozen=True)
class Finding:
    """What varies: the pieces of both texts, and what kind of thing it probably is; "" if that is unclear."""

    yours: str
    cached: str
    kind: str


def reach(explanation: Explanation) -> int:
    """How many full blocks would be reused."""
    return len(explanation.blocks) + explanation.more_blocks + explanation.tier_blocks


def difference(explanation: Explanation, tokens: Sequence[int], text: Text) -> Difference | None:
    """Where the text leaves what is cached; None if nothing cached goes on otherwise."""
    sibling, size = explanation.sibling, explanation.block_size
    if sibling is None or explanation.reason == "hit":
        return None
    index = reach(explanation)
    start = index * size
    token = start + sibling.num_shared
    if token >= len(tokens):
        return None
    own, other = tokens[token : start + size], sibling.token_ids[sibling.num_shared :]
    before = text(tokens[max(0, token - CONTEXT_TOKENS) : token])[-BEFORE_CHARS:]
    return Difference(
        token=token,
        block_index=index,
        offset_in_block=sibling.num_shared,
        shared_tokens=sibling.num_shared,
        before=before,
        yours=Side(list(own), text(own)),
        cached=CachedSide(list(other), text(other), sibling.block[0]),
    )


def find_cause(found: Difference, tokens: Sequence[int], text: Text) -> Finding:
    """Look at the characters around the difference, on both sides."""
    token = found.token
    left = tokens[max(0, token - CONTEXT_TOKENS) : token]
    yours = text([*left, *tokens[token : token + CONTEXT_TOKENS]])
    cached = text([*left, *found.cached.token_ids])
    at = next(
        (place for place, (a, b) in enumerate(zip(yours, cached, strict=False)) if a != b),
        min(len(yours), len(cached)),
    )
    for kind, pattern in CAUSES:
        for match in pattern.finditer(yours):
            start, end = match.span()
            other = pattern.match(cached, start)
            if start <= at < end and (other is not None or len(cached) < end):  # or its block ends there
                return Finding(match.group(), cached[start : other.end() if other else end], kind)
    own, theirs = text(tokens[token : token + 1]), text(found.cached.token_ids[:1])
    if UNREADABLE in own + theirs:  # a part of a character
        own, theirs = yours[at : at + 1] or own, cached[at : at + 1] or theirs
    return Finding(own, theirs, "")


def advise(
    explanation: Explanation,
    found: Difference | None,
    tokens: Sequence[int],
    text: Text,
    *,
    salt: str = "",
    unsalted_tokens: int = 0,
    elsewhere: bool = False,
    in_system_prompt: bool = False,
) -> str:
    """`unsalted_tokens`: how many the same text would find without its salt; `elsewhere`: its first block is
    there under another salt.
    """
    total, cached = explanation.num_tokens, explanation.num_cached_tokens
    left = total - cached
    match explanation.reason:
        case "hit":
            return f"{cached} of {total} tokens are cached: all but the last one, which is always computed."
        case "evicted" if explanation.eviction is not None:
            return _evicted(explanation, left)
        case "being_computed":
            return (
                f"{_so_far(cached, total)} {explanation.computed_by or 'Another request'} computes the next "
                "block right now: a request that is sent now waits for it, and then reuses it."
            )
        case "other_layout":
            return (
                "It was cached for another model, dtype or block size, and that was dropped: the first "
                f"request computes all {left} tokens again."
            )
    if unsalted_tokens:
        return (
            f"Nothing of it is cached under this cache_salt, but {unsalted_tokens} of {total} tokens are "
            "without a salt: only requests with the same cache_salt share."
        )
    if elsewhere:
        own = "under this cache_salt" if salt else "without a cache_salt"
        return (
            f"Nothing of it is cached {own}, but its first {explanation.block_size} tokens are under another "
            "one: only requests with the same cache_salt share."
        )
    if found is not None and found.token > 0:
        return _differs(explanation, found, tokens, text, in_system_prompt)
    return _unknown(explanation, found, salt)


def _so_far(cached: int, total: int) -> str:
    return f"{cached} of {total} tokens are cached." if cached else f"None of {total} tokens is cached."


def _evicted(explanation: Explanation, left: int) -> str:
    eviction = explanation.eviction
    assert eviction is not None
    ago = f"{eviction.seconds_ago:.0f} s ago" if eviction.seconds_ago >= 1 else "just now"
    size = explanation.block_size
    first = (reach(explanation)) * size
    what = (
        f"{_so_far(explanation.num_cached_tokens, explanation.num_tokens)} The block from token {first} on "
    )
    if eviction.cause in ("evict", "clear"):
        return (
            f"{what}was dropped {ago} by POST /kv/{eviction.cause}; {left} tokens are to be computed again."
        )
    if eviction.cause == "damaged":
        return f"{what}could not be read back {ago}; {left} tokens are to be computed again."
    if eviction.cause == "other_layout":
        return f"{what}was dropped {ago} for another model, dtype or block size."
    whom = f" of {eviction.request_id}" if eviction.request_id else ""
    return (
        f"{what}was evicted {ago} for the room{whom}, so {left} tokens are to be computed again: a pin "
        "(POST /kv/pins), a larger pool (pool_bytes) or a disk tier keeps it."
    )


def _differs(
    explanation: Explanation, found: Difference, tokens: Sequence[int], text: Text, in_system_prompt: bool
) -> str:
    total, size = explanation.num_tokens, explanation.block_size
    after = -(-total // size) - found.block_index - 1
    rest = f"its block and the {after} after it change" if after else "its block, the last one, changes"
    if not found.cached.token_ids:
        return (
            f"{_so_far(found.token, total)} What is cached ends there: {total - found.token} tokens are new."
        )
    cause = find_cause(found, tokens, text)
    where = "in the system prompt, " if in_system_prompt else ""
    kind = f", probably {cause.kind}" if cause.kind else ""
    said = (
        f"Token {found.token} differs: {where}yours has {_shown(cause.yours)}, the cached text "
        f"{_shown(cause.cached)}{kind}; {rest}, so {total - found.token} of {total} tokens are computed."
    )
    if cause.kind:
        return f"{said} Move what varies to the end of the prompt."
    if in_system_prompt:
        return (
            f"{said} Another system prompt shares nothing from there on: use one, or a few, for all requests."
        )
    return f"{said} What requests have in common is reused only if it comes first."


def _unknown(explanation: Explanation, found: Difference | None, salt: str) -> str:
    total, cached, size = explanation.num_tokens, explanation.num_cached_tokens, explanation.block_size
    under = " under this cache_salt" if salt else ""
    if cached and total - cached < size:  # of a part of a block nothing is remembered once it is gone
        rest = f"The rest, less than a block, is not: {total - cached} tokens are computed."
        return f"{_so_far(cached, total)} {rest}"
    if cached:
        new = total - cached
        return f"{_so_far(cached, total)} What follows was never computed{under}: {new} tokens are new."
    if total <= size:
        return (
            f"The prompt has {total} tokens, a block {size}: what is shorter is reused only where a cached "
            "text begins with it. So short a prompt costs next to nothing."
        )
    if found is not None:
        return (
            f"Nothing that begins like it is cached{under}: the very first token differs from what is. Put "
            "what requests have in common, a system prompt for example, at the beginning."
        )
    return (
        f"Nothing like it is cached{under}: the first request computes all {total} tokens, later ones reuse "
        "them."
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…")
