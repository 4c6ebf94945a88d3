"""What each start should find in the cache, by comparing whole texts; and that nobody computes what another
one is computing.

Within one event blocks may be evicted before a start's lookup or for it. So what it finds lies between the
best that is left after the event and the best of that and all that was there before: mostly these are equal.
"""

from array import array
from collections import Counter
from typing import NamedTuple

from kvmanager.core import Core
from kvmanager.pool.hashing import salt_digest
from kvmanager.protocol import Directives, SequenceStart, Start
from kvmanager.scheduling.requests import StartState
from kvmanager.state import Effects
from tests.sim.model import BLOCK_SIZE


class Text(NamedTuple):
    """All tokens up to the end of a block, and under which salt; `start` is where its own begin."""

    salt: bytes
    tokens: tuple[int, ...]
    start: int


class Sharing:
    """Follows the manager's blocks from event to event."""

    def __init__(self, statistics: Counter[str]) -> None:
        self._statistics = statistics
        self._texts: dict[int, Text] = {}  # of findable blocks
        self._of_hash: dict[bytes, tuple[int, ...]] = {}  # whole text of each block hash there ever was
        self._restored = False

    def restart(self) -> None:
        """Another manager takes over what the records say."""
        self._texts.clear()
        self._restored = True

    def event(self, core: Core, effects: Effects, salts: dict[str, str]) -> None:
        """Before its records are written."""
        pool = core.state.pool
        if self._restored and pool is not None:
            self._restored = False
            self._follow(core, set(range(pool.num_blocks)))
        starts = [
            start
            for _, message in effects.messages
            if isinstance(message, Directives)
            for start in message.starts
        ]
        before = dict(self._texts) if starts else {}
        self._follow(core, effects.records)
        for start in starts:
            salt = salt_digest(salts[start.request_id])
            for sequence in start.sequences:
                tokens = (*start.prompt_token_ids, *sequence.output_token_ids)
                if may_read(core, start):
                    self._check_hits(core, before, start, sequence, tokens, salt)
                    check_nobody_computes(core, start, sequence, tokens, salt)
                else:
                    assert sequence.num_cached_tokens == 0, start

    def _follow(self, core: Core, changed: set[int]) -> None:
        pool = core.state.pool
        for block in sorted(changed, key=lambda block: -1 if pool is None else pool.sealed_at[block]):
            assert pool is not None
            self._texts.pop(block, None)
            if pool.block_hash[block] and block not in pool.unfound:
                text = self._text(core, block)
                own = len(pool.tokens[block]) // 4
                self._texts[block] = Text(pool.salt[block], text, len(text) - own)

    def _text(self, core: Core, block: int) -> tuple[int, ...]:
        pool = core.state.pool
        assert pool is not None
        digest, parent = pool.block_hash[block], pool.parent_hash[block]
        if digest not in self._of_hash:
            above: tuple[int, ...] = ()
            if parent != pool.root:
                known = pool.index.find(parent)
                assert known is not None or parent in self._of_hash
                above = self._of_hash[parent] if known is None else self._text(core, known)
            self._of_hash[digest] = (*above, *array("I", pool.tokens[block]))
        return self._of_hash[digest]

    def _check_hits(
        self,
        core: Core,
        before: dict[int, Text],
        start: Start,
        sequence: SequenceStart,
        tokens: tuple[int, ...],
        salt: bytes,
    ) -> None:
        found = sequence.num_cached_tokens
        self._statistics["copied tails"] += sequence.copy_from is not None
        after = list(self._texts.values())
        most = best_hit([*before.values(), *after], tokens, salt)
        assert found <= most, f"{start}: {found} tokens are cached, and at most {most} were"
        copies_given_up = found % BLOCK_SIZE == 0 and len(core.state.actives()) == 1
        least = best_hit(after, tokens, salt)
        assert found >= (least // BLOCK_SIZE * BLOCK_SIZE if copies_given_up else least), (start, least)


def may_read(core: Core, start: Start) -> bool:
    (active,) = (active for active in core.state.actives() if active.start_id == start.start_id)
    return active.request.submit.read_cache or any(each.output_token_ids for each in start.sequences)


def best_hit(texts: list[Text], tokens: tuple[int, ...], salt: bytes) -> int:
    """Full blocks from the beginning, then the most alike of those that follow; but for the last token."""
    known = {text.tokens for text in texts if text.salt == salt and len(text.tokens) % BLOCK_SIZE == 0}
    length = 0
    while length + BLOCK_SIZE < len(tokens) and tokens[: length + BLOCK_SIZE] in known:
        length += BLOCK_SIZE
    most = length
    for text in texts:
        if text.salt == salt and text.start == length and text.tokens[:length] == tokens[:length]:
            same = length
            while same < min(len(text.tokens), len(tokens) - 1) and text.tokens[same] == tokens[same]:
                same += 1
            most = max(most, same)
    return most


def check_nobody_computes(
    core: Core, start: Start, sequence: SequenceStart, tokens: tuple[int, ...], salt: bytes
) -> None:
    """No earlier start, unless it stands still, has the first block before it that this one computes."""
    mine = sequence.num_cached_tokens // BLOCK_SIZE
    end = (mine + 1) * BLOCK_SIZE
    for active in core.state.actives():
        if active.start_id >= start.start_id or active.state is not StartState.RUNNING:
            continue
        for other in active.sequences.values():
            if other.salt == salt and other.num_settled <= mine < len(other.announced) and end <= len(tokens):
                assert tuple(other.tokens[:end]) != tokens[:end], (
                    f"start {start.start_id} computes what start {active.start_id} does"
                )
