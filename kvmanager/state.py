"""Everything that the manager's core knows, and what an event makes it do: the effects."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvmanager.pool.block_pool import BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import tenant_bytes
from kvmanager.protocol import At
from kvmanager.scheduling.clients import Client, Frontend, Quarantine, Runner
from kvmanager.scheduling.in_flight import InFlight
from kvmanager.scheduling.pins import PinKey, Pins, SavedPin
from kvmanager.scheduling.requests import ActiveStart, Ended, Request, RequestState, StartState, WaitingQueue
from kvmanager.scheduling.roll_call import RollCall
from kvmanager.tier.tiering import Tiering
from kvmanager.tier.tiers import Copy

MAX_ENDED = 256  # requests that are gone, kept for those who ask


@dataclass(frozen=True)
class Policy:
    """What can be set."""

    max_waiting: int = 1024  # requests
    watermark: float = 0.01  # share of the pool
    runner_wait: float = 30.0  # seconds that requests wait while there is no runner
    prefix_wait: float = 10.0  # seconds without progress after which nobody waits for a sequence's prefix
    resume: str = "auto"  # how content comes back from the tier: see Tiering
    pin_budget: float = 0.25  # share of the pool that pins may hold
    tenant_pin_budget: float = 0.05  # of that, what those of one tenant may hold
    pin_part: int = 256  # blocks that a pin takes, or lets go of, at once
    growth_room: float = 0.2  # share of the pool that starts leave to the growth of what runs, at most
    roll_call_wait: float = 2.0  # seconds that those who lived through a restart get to say what they hold


class Effects:
    """What to do after an event, in this order: write records and pins, send messages, erase, begin copies,
    end sessions.
    """

    pins: Mapping[PinKey, SavedPin | None] = MappingProxyType({})  # those that changed; None: gone
    erasures: Collection[int] = ()  # slots of the tier whose content is to be gone from the disk too
    demotions: Collection[Copy] = ()  # each is answered by `Core.copied`
    promotions: Collection[Copy] = ()
    ended: tuple[int, ...] = ()  # client_ids whose session is over

    def __init__(self) -> None:
        self.records: set[int] = set()  # blocks whose record changed
        self.messages: list[tuple[int, Any]] = []  # (client_id, message)


@dataclass(slots=True)
class Counters:
    """They only rise, from the manager's start on."""

    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    prefix_waits: int = 0  # times that a request waited for a prefix in flight
    preemptions: int = 0
    recomputed_tokens: int = 0  # that were computed before a preemption, and are to be computed again
    rejected: int = 0
    dropped_messages: int = 0


class State:
    """All of it. A request is in its frontend's `requests`, and in `waiting` or in a runner's `active`."""

    def __init__(self, boot_id: str, pool_directory: str, policy: Policy, now: float) -> None:
        self.boot_id = boot_id
        self.pool_directory = pool_directory
        self.policy = policy
        self.pool: BlockPool | None = None
        self.tiering: Tiering | None = None  # None: nothing is kept below the pool
        self.clients: dict[int, Client] = {}
        self.by_lock: dict[str, Client] = {}
        self.runners: list[Runner] = []
        self.quarantines: dict[str, Quarantine] = {}  # by lock
        self.survivors: set[str] = set()  # locks of an earlier start's processes without a used session
        self.roll_call: RollCall | None = None  # while they are asked what they hold
        self.pins = Pins(policy.pin_budget, policy.tenant_pin_budget, policy.pin_part)
        self.waiting = WaitingQueue()
        self.in_flight = InFlight(self.waiting)
        self.ended: dict[str, deque[Ended]] = {}
        """By tenant: what of one is shown does not depend on how many others have. By "": of all."""
        self.counters = Counters()
        self.last_client_id = 0
        self.last_start_id = int(now * 1e6)
        """Higher than those of an earlier manager on this host, with which runners may go on."""
        self.last_serial = 0
        self.last_runner_seen = now  # seconds; when one came, got on (as of the last tick), or left
        self.admission_due = False  # something changed that may let a request start
        self.usual_share = 1.0  # of the tokens that requests may still have, what they come to have
        self.effects = Effects()

    def send(self, client: Client, message: Any) -> None:
        self.effects.messages.append((client.client_id, message))

    def at(self, tenant: str = "") -> At:
        """Which state this is, for answers: a tenant's is numbered by its own events."""
        if self.pool is None:
            return At(self.boot_id, 0)
        log = self.pool.log
        return At(self.boot_id, log.own(tenant_bytes(tenant)).last if tenant else log.last)

    def sequences(self, tenant: str = "") -> list[Sequence]:
        """Every sequence that runs; or those of a tenant alone."""
        prefix = tenant_bytes(tenant)
        return [
            sequence
            for active in self.actives()
            if active.request.salt.startswith(prefix)
            for sequence in active.sequences.values()
        ]

    def actives(self) -> list[ActiveStart]:
        """Every start on every runner."""
        return [active for runner in self.runners for active in runner.active.values()]

    def forget(self, request: Request) -> None:
        """The request is over for its frontend; a start of it may still have to end."""
        assert request.state is not RequestState.GONE
        if request.state is RequestState.WAITING:
            if request.awaited is not None:
                self.in_flight.leave(request)
            self.waiting.remove(request)
            self.admission_due = True
        request.state = RequestState.GONE
        submit, info = request.submit, request.describe("ended", 0.0)
        for tenant in {"", submit.tenant}:
            if tenant not in self.ended:
                self.ended[tenant] = deque(maxlen=MAX_ENDED)
            self.ended[tenant].append(Ended(submit.arrival, info))
        frontend: Frontend = request.frontend
        del frontend.requests[submit.request_id]
        frontend.remember(submit.request_id, submit.attempt, request.counted)

    def cancel(self, request: Request) -> None:
        """Forget the request; if it runs, its runner is told, and keeps its blocks until it acknowledges."""
        active = request.active
        self.forget(request)
        if active is not None:
            if active.state is StartState.RUNNING:
                active.runner.outbox.cancels += (active.start_id,)  # its step goes on: who waits, waits
            active.state = StartState.CANCELLING

    def withdraw(self, active: ActiveStart) -> None:
        """Nobody may wait for what this start has not yet computed."""
        for sequence in active.sequences.values():
            if self.in_flight.withdraw(sequence):
                self.admission_due = True
