"""Who has said Hello: frontends with their requests, runners with their starts and credits, and fenced
runners.
"""

from collections import OrderedDict, deque
from hashlib import sha256
from typing import TYPE_CHECKING

from kvmanager.pool.ledger import Holder
from kvmanager.protocol import BlockRef, Clear, Directives, Evict, FrontendHello, RunnerHello, Start

if TYPE_CHECKING:
    from kvmanager.asking.commands import Sweep
    from kvmanager.asking.long_text import LongText
    from kvmanager.scheduling.requests import ActiveStart, Request

OWNER_TAG_BYTES = 8
MAX_REMEMBERED = 8192  # requests of a frontend that are gone, kept to answer a repeated Submit
MAX_FINISHED = 1024  # finished sequences whose tokens may still wait in their runner


def owner_tag(lock: str) -> bytes:
    """What stands for the process with this lock name in a block's record."""
    return sha256(lock.encode()).digest()[:OWNER_TAG_BYTES]


class Frontend:
    """A frontend's session, its requests that are neither finished nor dropped, and what has to be known of
    the others.
    """

    __slots__ = ("client_id", "gone", "hello", "requests", "sweeps", "texts", "touched")

    def __init__(self, client_id: int, hello: FrontendHello) -> None:
        self.client_id = client_id
        self.hello = hello
        self.touched = False  # its process has sent something under this session
        self.requests: dict[str, Request] = {}
        self.gone: OrderedDict[str, int] = OrderedDict()  # request_id → 2 · attempt + whether it was counted
        self.sweeps: OrderedDict[Evict | Clear, Sweep] = OrderedDict()
        """Commands that are done in part: see `commands`."""
        self.texts: OrderedDict[int, LongText] = OrderedDict()
        """Beginnings of texts that are asked about, by question: see `long_text`."""

    def remember(self, request_id: str, attempt: int, counted: bool) -> None:
        """This attempt is over. A number is kept of it, as many are kept and most are never asked for."""
        self.gone[request_id] = 2 * attempt + counted
        self.gone.move_to_end(request_id)
        if len(self.gone) > MAX_REMEMBERED:
            self.gone.popitem(last=False)

    def remembered(self, request_id: str) -> tuple[int, bool]:
        """The last attempt that is over, and whether its lookup is in the statistics."""
        attempt, counted = divmod(self.gone.get(request_id, -2), 2)
        return attempt, counted == 1


class Runner(Holder):
    """A runner's session. As a holder it holds its credits: blocks granted ahead, in no table yet."""

    __slots__ = (
        "active",
        "client_id",
        "credits",
        "credits_wanted",
        "dismissed",
        "draining",
        "finished",
        "hello",
        "kept",
        "last_heard",
        "num_tail_tokens",
        "outbox",
        "ready",
        "seats",
        "touched",
    )

    def __init__(self, client_id: int, hello: RunnerHello, now: float) -> None:
        super().__init__(owner_tag(hello.lock))
        self.client_id = client_id
        self.hello = hello
        self.touched = False
        self.ready = False
        self.draining = False
        self.dismissed = False  # was told that it may end
        self.active: dict[int, ActiveStart] = {}  # by start_id
        self.seats = 0  # sequences, and those that they will fork
        self.finished: deque[tuple[int, str, int]] = deque(maxlen=MAX_FINISHED)
        """(client_id of the frontend, request_id, attempt): should this runner die, their last tokens may die
        with it.
        """
        self.credits: set[int] = set()
        self.kept: tuple[int, ...] = ()  # start_ids that were taken over from an earlier start of the manager
        self.credits_wanted = 0
        self.num_tail_tokens = 0
        self.last_heard = now  # seconds
        self.outbox = Outbox()

    def describe(self) -> str:
        return f"credits of runner {self.hello.name!r} (client {self.client_id})"

    def dismiss(self) -> None:
        """Tell it, once, that it may end, when it has handed back all that it had."""
        if not (self.dismissed or self.active or self.credits):
            self.dismissed = self.outbox.dismissed = True

    def free_seats(self) -> int:
        """Sequences that may be started on it now."""
        return self.hello.max_num_seqs - self.seats if self.ready and not self.draining else 0


class Outbox:
    """What the runner is to be told when the current event has been handled: one message."""

    __slots__ = ("cancels", "credits", "dismissed", "preempts", "starts")

    def __init__(self) -> None:
        self.starts: tuple[Start, ...] = ()
        self.cancels: tuple[int, ...] = ()
        self.preempts: tuple[int, ...] = ()
        self.credits: tuple[BlockRef, ...] = ()
        self.dismissed = False

    def take(self) -> Directives | None:
        """All of it as one message, or None if there is nothing."""
        if not (self.credits or self.starts or self.cancels or self.preempts or self.dismissed):
            return None
        directives = Directives(self.starts, self.cancels, self.preempts, self.credits, self.dismissed)
        self.starts = self.cancels = self.preempts = self.credits = ()
        self.dismissed = False
        return directives


class Quarantine(Holder):
    """Blocks that a process may still use although its session is over, until it uses a new one or dies."""

    __slots__ = ("blocks", "lock")

    def __init__(self, lock: str) -> None:
        super().__init__(owner_tag(lock))
        self.lock = lock
        self.blocks: list[int] = []

    def describe(self) -> str:
        return f"quarantine for the process with lock {self.lock!r}"


Client = Frontend | Runner
