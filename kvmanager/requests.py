"""Requests, the ways in which they are started, and the queue of those that wait."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain
from typing import NamedTuple

from kvmanager.block_pool import BlockPool
from kvmanager.block_table import Sequence
from kvmanager.clients import Frontend, Runner
from kvmanager.hashing import block_hash, salt_digest, token_array
from kvmanager.protocol import Choice, Submit


class RequestState(Enum):
    """GONE: finished, cancelled, replaced or lost; nothing more happens for it."""

    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


class StartState(Enum):
    """CANCELLING and PREEMPTING: the runner was told, and has not acknowledged for every sequence."""

    RUNNING = auto()
    CANCELLING = auto()
    PREEMPTING = auto()


class Found(NamedTuple):
    """What the cache has of a text: full blocks, then the first `num_shared` tokens of `source`."""

    blocks: list[int]
    source: int = 0
    num_shared: int = 0


class Group:
    """Choices of a request with equal output so far: they start as one sequence and fork later."""

    __slots__ = ("_hashes", "choices", "output", "tokens")

    def __init__(self, prompt: "array[int]", choices: tuple[int, ...], output: tuple[int, ...]) -> None:
        self.choices = choices
        self.output = output
        self.tokens = prompt + token_array(output)
        self._hashes: list[bytes] = []  # of the first full blocks, as far as they were asked for

    def lookup(self, pool: BlockPool, salt: bytes) -> Found:
        """Blocks that hold this group's first tokens, in order; the last token is left to be computed."""
        size = pool.block_size
        found: list[int] = []
        parent = pool.root
        for index in range((len(self.tokens) - 1) // size):
            if index == len(self._hashes):
                self.hashes(pool, salt, index + 1)
            digest = self._hashes[index]
            block = pool.find(digest, parent, self.tokens[index * size : (index + 1) * size].tobytes())
            if block is None:
                break
            found.append(block)
            parent = digest
        rest = self.tokens[len(found) * size : min((len(found) + 1) * size, len(self.tokens) - 1)]
        return Found(found, *pool.children.most_alike(parent + salt, rest.tobytes()))

    def hashes(self, pool: BlockPool, salt: bytes, count: int) -> list[bytes]:
        """Block hashes of at least the first `count` full blocks."""
        size, hashes = pool.block_size, self._hashes
        for index in range(len(hashes), count):
            packed = self.tokens[index * size : (index + 1) * size].tobytes()
            hashes.append(block_hash(hashes[-1] if hashes else pool.root, packed, salt))
        return hashes

    def rest(self, pool: BlockPool, salt: bytes, start: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Hash, parent hash and packed tokens of each full block from `start` on that a lookup may find."""
        size = pool.block_size
        for index in range(start, (len(self.tokens) - 1) // size):
            hashes = self.hashes(pool, salt, index + 1)
            parent = hashes[index - 1] if index else pool.root
            yield hashes[index], parent, self.tokens[index * size : (index + 1) * size].tobytes()


class Request:
    """What a frontend submitted. `groups` is what a start of it runs, `later` what has to wait until that
    has ended.
    """

    __slots__ = (
        "active",
        "awaited",
        "computed",
        "copies_until",
        "counted",
        "frontend",
        "groups",
        "later",
        "max_length",
        "order",
        "preemptions",
        "prompt",
        "salt",
        "state",
        "submit",
    )

    def __init__(self, frontend: Frontend, submit: Submit, serial: int) -> None:
        self.frontend = frontend
        self.submit = submit
        self.order = (submit.priority, submit.arrival, serial)
        self.prompt = token_array(submit.prompt_token_ids)
        self.max_length = len(self.prompt) + submit.sampling.max_tokens  # tokens of a choice, prompt included
        self.salt = salt_digest(submit.cache_salt, submit.tenant)
        self.state = RequestState.WAITING
        self.active: ActiveStart | None = None
        self.awaited: bytes | None = None  # hash of the block in flight that it waits for
        self.computed: dict[int, int] = {}  # tokens of each choice that an earlier start had computed
        self.preemptions = 0
        self.copies_until: float | None = None  # until when it waits for its blocks to come from a tier
        self.counted = False  # its lookup is in the statistics
        self.groups = self.group(submit.choices)
        self.later: list[Group] = []

    @property
    def num_choices(self) -> int:
        """Choices that a start of it runs."""
        return sum([len(group.choices) for group in self.groups])

    def group(self, choices: tuple[Choice, ...]) -> list[Group]:
        by_output: dict[tuple[int, ...], list[int]] = {}
        for choice in choices:
            by_output.setdefault(choice.output_token_ids, []).append(choice.index)
        return [Group(self.prompt, tuple(indices), output) for output, indices in by_output.items()]


class ActiveStart:
    """A request on a runner, from its Start until the last of its sequences has ended."""

    __slots__ = ("request", "resume", "runner", "sequences", "start_id", "started_at", "state")

    def __init__(self, start_id: int, request: Request, runner: Runner, now: float) -> None:
        self.start_id = start_id
        self.request = request
        self.runner = runner
        self.started_at: float | None = now  # None once it is known how fast its first tokens were computed
        self.state = StartState.RUNNING
        self.sequences: dict[int, Sequence] = {}  # by choice
        self.resume: list[Choice] = []  # ended because they were preempted


class WaitingQueue:
    """Requests that wait: by priority, then arrival, then order of coming. Bounded by whoever adds.

    Some may be set aside: they wait, and are in the queue, but have no turn until they are put back.
    """

    __slots__ = ("_aside", "_entries")

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, float, int], Request]] = []
        self._aside: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """Those that have a turn, in order, then those set aside."""
        return chain((request for _, request in self._entries), self._aside)

    @property
    def first(self) -> Request | None:
        """Whose turn it is."""
        return self._entries[0][1] if self._entries else None

    def set_aside(self, request: Request) -> None:
        self.remove(request)
        self._aside[request] = None

    def put_back(self, request: Request) -> None:
        """To its place in the order."""
        del self._aside[request]
        self.add(request)

    def add(self, request: Request) -> None:
        insort(self._entries, (request.order, request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        place = bisect_left(self._entries, request.order, key=lambda entry: entry[0])
        assert self._entries[place][1] is request
        del self._entries[place]
