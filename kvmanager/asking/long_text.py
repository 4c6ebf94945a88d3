"""Texts too long for one question or command: they come in parts, each hashed and looked up as it comes.

What was found of earlier parts may be gone when the last one has come, or lie in another block: the events
since then say which, and only those are looked up again. So the answer is of one moment, and no message costs
more than its part.
"""

from array import array
from collections import Counter

from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import Held, hash_chain, salt_digest, token_array
from kvmanager.protocol import MAX_PROMPT_TOKENS, Evict, ExplainQuery, Pin, PlanQuery, TextPart
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Found, Group
from kvmanager.state import State
from kvmanager.tier.tiers import Tier

AboutText = ExplainQuery | PlanQuery | Pin | Evict

MAX_TEXTS = 16  # of a frontend, of which parts have come, and not yet the question
IN_TIER = -1
MANY_EVENTS = 2048  # after so many everything is looked up again


class LongText(Group):
    """The one group of a request that is only asked about."""

    __slots__ = ("_found", "_places", "_seen", "_tier", "salt", "tenant")

    def __init__(self, cache_salt: str, tenant: str, pool: BlockPool, tier: Tier | None) -> None:
        super().__init__(array("I"), (0,), ())
        self.tenant = tenant
        self.salt = salt_digest(cache_salt, tenant)
        self._tier = tier
        self._found: list[int] = []  # of the first full blocks: a block in the pool, or IN_TIER
        self._places: dict[bytes, int] = {}  # hash → which of those
        self._seen = pool.log.last  # number of the last event that `_found` knows of

    def add(self, tokens: "array[int]", pool: BlockPool) -> None:
        """The next part."""
        self.tokens = self.tokens + tokens
        blocks, width = self._blocks, pool.block_size
        packed = self.tokens[len(blocks) * width :].tobytes()
        blocks += hash_chain(blocks[-1][0] if blocks else pool.root, packed, pool.block_bytes, self.salt)
        self._look_again(pool)
        while len(self._found) < (len(self.tokens) - 1) // width:
            content = blocks[len(self._found)]
            place = self._find(pool, content)
            if place is None:
                break
            self._places[content[0]] = len(self._found)
            self._found.append(place)

    def lookup(self, pool: BlockPool, salt: bytes) -> Found:
        """As any group's: nothing has happened since the last part was added."""
        found = self._found
        blocks = found[: found.index(IN_TIER)] if IN_TIER in found else found
        return self.below(pool, blocks)

    def beyond(self, pool: BlockPool, tier: Tier, salt: bytes, reach: int) -> tuple[list[int], list[bytes]]:
        """The same."""
        rest = self._found[reach:]
        missing = [self._blocks[place][0] for place, there in enumerate(rest, reach) if there == IN_TIER]
        return [block for block in rest if block != IN_TIER], missing

    def below(self, pool: BlockPool, blocks: list[int]) -> Found:
        """These first full blocks, and what is found after them."""
        size, reach = pool.block_size, len(blocks)
        parent = self._blocks[reach - 1][0] if reach else pool.root
        rest = self.tokens[reach * size : min((reach + 1) * size, len(self.tokens) - 1)]
        return Found(blocks, *pool.children.most_alike(parent + self.salt, rest.tobytes()))

    def find_next(self, pool: BlockPool, reach: int, count: int) -> list[int]:
        """At most so many of the full blocks after the first `reach`, as they are found now."""
        end = min(reach + count, (len(self.tokens) - 1) // pool.block_size)
        found: list[int] = []
        for content in self._blocks[reach:end]:
            block = pool.find(content)
            if block is None:
                break
            found.append(block)
        return found

    def _find(self, pool: BlockPool, content: Held) -> int | None:
        block = pool.find(content)
        if block is None and self._tier is not None and self._tier.find(content):
            return IN_TIER
        return block

    def _look_again(self, pool: BlockPool) -> None:
        log = pool.log
        if self._seen != log.last and not (log.has(self._seen) and log.last - self._seen <= MANY_EVENTS):
            self._cut(0)
        else:
            events = log.raw_since(self._seen, MANY_EVENTS)
            told_of = [digest for _, _, _, _, (digest, _, _, _), *_ in events]
            changed = {self._places[digest] for digest in told_of if digest in self._places}
            for place in sorted(changed):
                there = self._find(pool, self._blocks[place])
                if there is None:
                    self._cut(place)
                    break
                self._found[place] = there
        self._seen = log.last

    def _cut(self, place: int) -> None:
        for digest, _, _, _ in self._blocks[place : len(self._found)]:
            del self._places[digest]
        del self._found[place:]


def take(state: State, frontend: Frontend, part: TextPart) -> None:
    """Keep it for the question with its number, if there is anything to ask about."""
    pool = state.pool
    if pool is None:
        return
    texts, number = frontend.texts, part.query_id
    text = texts.pop(number, None) or begin(state, pool, part)
    if len(text.tokens) == part.start and part.start + len(part.token_ids) < MAX_PROMPT_TOKENS:
        text.add(token_array(part.token_ids), pool)
        texts[number] = text
    if len(texts) > MAX_TEXTS:
        numbers = list(texts)
        del texts[numbers[first_of_most([text.tenant for text in texts.values()])]]


def first_of_most(tenants: list[str]) -> int:
    """Where the one is first that is there most often: whose things have to give way."""
    return tenants.index(Counter(tenants).most_common(1)[0][0])


def is_torn(frontend: Frontend, query: AboutText) -> bool:
    """Whether not all of the text has come before the question: an answer would be about another one. What
    has come is dropped then.
    """
    text = frontend.texts.get(query.query_id)
    torn = query.start != (0 if text is None else len(text.tokens))
    if torn:
        frontend.texts.pop(query.query_id, None)
    return torn


def whole(frontend: Frontend, query: ExplainQuery | PlanQuery, pool: BlockPool | None) -> LongText | None:
    """The text of the question, if parts of it have come before."""
    text = frontend.texts.pop(query.query_id, None)
    if text is not None and pool is not None:
        text.add(token_array(query.token_ids), pool)
    return text


def begin(state: State, pool: BlockPool, message: TextPart | Pin | Evict) -> LongText:
    tier = state.tiering.tier if state.tiering is not None else None
    return LongText(message.cache_salt, message.tenant, pool, tier)


def of_command(state: State, frontend: Frontend, command: Pin | Evict, pool: BlockPool) -> LongText:
    """The text of the command, be it long or short."""
    text = frontend.texts.pop(command.query_id, None) or begin(state, pool, command)
    text.add(token_array(command.token_ids), pool)
    return text
