"""Texts too long for one question: they come in parts, each hashed and looked up as it comes.

What was found of earlier parts may be gone when the last one has come, or lie in another block: the events
since then say which, and only those are looked up again. So the answer is of one moment, and no message costs
more than its part.
"""

from array import array

from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.hashing import hash_chain, salt_digest, token_array
from kvmanager.protocol import MAX_PROMPT_TOKENS, ExplainQuery, PlanQuery, TextPart
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Found, Group
from kvmanager.state import State

MAX_TEXTS = 16  # of which parts have come, and not yet the question
MANY_EVENTS = 2048  # after so many everything is looked up again


class LongText(Group):
    """The one group of a request that is only asked about."""

    __slots__ = ("_found", "_places", "_salt", "_seen")

    def __init__(self, salt: bytes, pool: BlockPool) -> None:
        super().__init__(array("I"), (0,), ())
        self._salt = salt
        self._found: list[int] = []  # what a lookup found of the first full blocks
        self._places: dict[bytes, int] = {}  # hash → which of those
        self._seen = pool.log.last  # number of the last event that `_found` knows of

    def add(self, tokens: "array[int]", pool: BlockPool) -> None:
        """The next part."""
        self.tokens = self.tokens + tokens
        blocks, width = self._blocks, pool.block_size
        packed = self.tokens[len(blocks) * width :].tobytes()
        blocks += hash_chain(blocks[-1][0] if blocks else pool.root, packed, pool.block_bytes, self._salt)
        self._look_again(pool)
        while len(self._found) < (len(self.tokens) - 1) // width:
            content = blocks[len(self._found)]
            block = pool.find(content)
            if block is None:
                break
            self._places[content[0]] = len(self._found)
            self._found.append(block)

    def lookup(self, pool: BlockPool, salt: bytes) -> Found:
        """As any group's: nothing has happened since the last part was added."""
        size, reach = pool.block_size, len(self._found)
        parent = self._blocks[reach - 1][0] if reach else pool.root
        rest = self.tokens[reach * size : min((reach + 1) * size, len(self.tokens) - 1)]
        return Found(self._found, *pool.children.most_alike(parent + salt, rest.tobytes()))

    def _look_again(self, pool: BlockPool) -> None:
        log = pool.log
        if self._seen != log.last and not (log.has(self._seen) and log.last - self._seen <= MANY_EVENTS):
            self._cut(0)
        else:
            events = log.raw_since(self._seen, MANY_EVENTS)
            told_of = [digest for _, _, _, _, (digest, _, _, _), *_ in events]
            changed = {self._places[digest] for digest in told_of if digest in self._places}
            for place in sorted(changed):
                block = pool.find(self._blocks[place])
                if block is None:
                    self._cut(place)
                    break
                self._found[place] = block
        self._seen = log.last

    def _cut(self, place: int) -> None:
        for digest, _, _, _ in self._blocks[place : len(self._found)]:
            del self._places[digest]
        del self._found[place:]


def take(state: State, frontend: Frontend, part: TextPart) -> None:
    """Keep it for the question with its number."""
    key = (frontend.client_id, part.query_id)
    if state.pool is None:
        return
    text = state.texts.pop(key, None) or LongText(salt_digest(part.cache_salt, part.tenant), state.pool)
    if len(text.tokens) == part.start and part.start + len(part.token_ids) < MAX_PROMPT_TOKENS:
        text.add(token_array(part.token_ids), state.pool)
        state.texts[key] = text
    if len(state.texts) > MAX_TEXTS:
        state.texts.popitem(last=False)


def is_torn(state: State, frontend: Frontend, query: ExplainQuery | PlanQuery) -> bool:
    """Whether not all of the text has come before the question: an answer would be about another one."""
    text: LongText | None = state.texts.get((frontend.client_id, query.query_id))
    return state.pool is not None and query.start != (0 if text is None else len(text.tokens))


def whole(state: State, frontend: Frontend, query: ExplainQuery | PlanQuery) -> LongText | None:
    """The text of the question, if parts of it have come before."""
    text: LongText | None = state.texts.pop((frontend.client_id, query.query_id), None)
    if text is not None and state.pool is not None:
        text.add(token_array(query.token_ids), state.pool)
    return text
