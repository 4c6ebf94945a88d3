"""Requests, the ways in which they are started, and the queue of those that wait."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct

from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import Held, hash_chain, salt_digest, token_array
from kvmanager.protocol import Choice, Lookup, RequestInfo, RequestKind, SequenceInfo, Submit
from kvmanager.scheduling.clients import Frontend, Runner

if TYPE_CHECKING:
    from kvmanager.tier.tiers import Tier


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


class Found(Struct, frozen=True):
    """What the cache has of a text: full blocks, then the first `num_shared` tokens of `source`."""

    blocks: list[int]
    source: int = 0
    num_shared: int = 0


class Group:
    """Choices of a request with equal output so far: they start as one sequence and fork later."""

    __slots__ = ("_blocks", "choices", "output", "tokens")

    def __init__(self, prompt: "array[int]", choices: tuple[int, ...], output: tuple[int, ...]) -> None:
        self.choices = choices
        self.output = output
        self.tokens = prompt + token_array(output) if output else prompt  # never changed
        self._blocks: list[Held] = []  # empty until they are asked for

    def lookup(self, pool: BlockPool, salt: bytes) -> Found:
        """Blocks that hold this group's first tokens, in order; the last token is left to be computed."""
        size, last, find = pool.block_size, len(self.tokens) - 1, pool.find
        found: list[int] = []
        parent = pool.root
        for content in self.findable(pool, salt):
            block = find(content)
            if block is None:
                break
            found.append(block)
            parent = content[0]
        rest = self.tokens[len(found) * size : min((len(found) + 1) * size, last)]
        return Found(found, *pool.children.most_alike(parent + salt, rest.tobytes()))

    def beyond(self, pool: BlockPool, tier: "Tier", salt: bytes, reach: int) -> tuple[list[int], list[bytes]]:
        """What is found on from the first `reach` full blocks, if the tier is looked at too: blocks in the
        pool, and hashes of those that only the tier has.
        """
        found: list[int] = []
        missing: list[bytes] = []
        for content in self.findable(pool, salt)[reach:]:
            block = pool.find(content)
            if block is not None:
                found.append(block)
            elif tier.find(content):
                missing.append(content[0])
            else:
                break
        return found, missing

    def blocks(self, pool: BlockPool, salt: bytes) -> list[Held]:
        """What each of its full blocks holds."""
        if not self._blocks:
            self._blocks = hash_chain(pool.root, self.tokens.tobytes(), pool.block_bytes, salt)
        return self._blocks

    def findable(self, pool: BlockPool, salt: bytes) -> list[Held]:
        """Those of its full blocks that a lookup may find: at least the last token has to be computed."""
        return self.blocks(pool, salt)[: (len(self.tokens) - 1) // pool.block_size]


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
        "lookup",
        "max_length",
        "order",
        "preemptions",
        "promoted",
        "prompt",
        "salt",
        "search",
        "serial",
        "state",
        "submit",
        "waited_for",
        "waited_since",
    )

    def __init__(self, frontend: Frontend, submit: Submit, serial: int) -> None:
        self.frontend = frontend
        self.submit = submit
        self.serial = serial
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
        self.lookup: Lookup | None = None  # what its last start found
        self.promoted = 0  # blocks that came from a tier for it
        self.waited_for = ""  # request_id of whom it waited for last, as that one computed its prefix
        self.waited_since = 0.0  # seconds
        self.counted = False  # its lookup is in the statistics
        self.search = submit.search  # where it goes on, if it is a beam search
        self.groups = self.group(submit.choices)
        self.later: list[Group] = []

    @property
    def reads_cache(self) -> bool:
        """Whether its next start does. One that shall compute its prompt has done so once it has output."""
        return self.submit.read_cache or any(group.output for group in self.groups)

    @property
    def num_choices(self) -> int:
        """Choices that a start of it runs."""
        groups = self.groups
        return len(groups[0].choices) if len(groups) == 1 else sum([len(group.choices) for group in groups])

    def describe(
        self, kind: RequestKind, now: float, runner: str = "", sequences: tuple[SequenceInfo, ...] = ()
    ) -> RequestInfo:
        """As it is to be told."""
        submit = self.submit
        return RequestInfo(
            submit.request_id,
            self.frontend.hello.name,
            kind,
            submit.priority,
            now - submit.arrival,
            submit.attempt,
            len(self.prompt),
            submit.sampling.max_tokens,
            len(submit.choices),
            self.preemptions,
            runner,
            self.lookup,
            sequences,
        )

    def beams(self) -> list[Choice]:
        """What the next start of a beam search runs."""
        if self.search is None:
            return [Choice(choice.index) for choice in self.submit.choices]
        return [Choice(index, path.token_ids) for index, path in enumerate(self.search.beams)]

    def group(self, choices: tuple[Choice, ...]) -> list[Group]:
        by_output: dict[tuple[int, ...], list[int]] = {}
        for choice in choices:
            by_output.setdefault(choice.output_token_ids, []).append(choice.index)
        return [Group(self.prompt, tuple(indices), output) for output, indices in by_output.items()]


class Ended(Struct, frozen=True):
    """What is kept of a request that is over; `info` is of its end."""

    arrival: float  # seconds
    info: RequestInfo


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
        insort(self._entries, (request.order, request))  # no two are of one order

    def remove(self, request: Request) -> None:
        place = bisect_left(self._entries, (request.order,))
        assert self._entries[place][1] is request
        del self._entries[place]
