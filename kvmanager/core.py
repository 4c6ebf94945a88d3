"""The manager's core: a synchronous function of what it knows, the time and one event. No sockets, clocks or
files.

    effects = core.handle(now, client_id, message)      a message under a session
    answer, effects = core.hello(now, hello)            a Hello
    effects = core.process_died(now, lock)              a process no longer holds its lock
    effects = core.copied(now, copy, …)                 a copy from or to the tier is over
    effects = core.tick(now)                            time passes

The caller carries effects out in their order: records, messages, copies, then sessions that ended.
"""

from collections.abc import Callable

from kvmanager.asking import commands, introspection, long_text, pinning
from kvmanager.asking.event_log import EventLog
from kvmanager.pool.block_pool import BlockPool
from kvmanager.protocol import (
    Cancel,
    Claimed,
    Clear,
    Draining,
    Evict,
    ExplainQuery,
    Hello,
    Layout,
    Pin,
    PinsQuery,
    PlanQuery,
    Query,
    Question,
    Ready,
    Refused,
    Session,
    StatsQuery,
    StepReport,
    Submit,
    TextPart,
    ToManager,
    Unpin,
    Welcome,
)
from kvmanager.scheduling import admission, pressure, reports, sessions, submissions, takeover
from kvmanager.scheduling.clients import Frontend, Quarantine, Runner
from kvmanager.scheduling.pins import SavedPin
from kvmanager.scheduling.roll_call import RollCall
from kvmanager.state import Effects, Policy, State
from kvmanager.tier.tiering import Tiering
from kvmanager.tier.tiers import Copy, Tier

ASKED = Question | TextPart
WITHOUT_EVENTS = TextPart | Pin | Unpin | PinsQuery


AT_ONCE = 4096  # events that are looked at in one go: about a millisecond
MAX_TOO_EARLY = 256  # questions that wait for that; of more, some get no answer


class Core:
    """One start of the manager. It has no pool until `attach`, before the first runner's Hello."""

    def __init__(self, boot_id: str, pool_directory: str, policy: Policy, now: float) -> None:
        self.state = State(boot_id, pool_directory, policy, now)
        self.unix_offset = 0.0  # seconds, from the clock of `now` to Unix time
        self._too_early: list[tuple[int, Query]] = []  # questions, by client, until events are looked at

    def attach(
        self,
        pool: BlockPool,
        quarantines: tuple[Quarantine, ...] = (),
        survivors: tuple[str, ...] = (),
        tier: Tier | None = None,
    ) -> None:
        """Use this pool, and the tier below it. `survivors`: locks of processes that were there before this
        start.

        Until they have used a session with this one, or die, they may read any block that only looks unused:
        nothing is evicted meanwhile.
        """
        state = self.state
        assert state.pool is None
        state.pool = pool
        state.quarantines = {quarantine.lock: quarantine for quarantine in quarantines}
        state.survivors = set(survivors)
        pool.may_evict = not survivors
        if survivors:
            state.roll_call = RollCall(survivors, state.policy.roll_call_wait)
        if tier is not None:
            state.tiering = Tiering(tier, state.policy.resume)
            tier.attach(pool.log)

    def restore_pins(self, now: float, saved: list[SavedPin]) -> None:
        """After `attach` and before anything else: pin again what is still cached of these."""
        assert self.state.pool is not None
        self.state.pins.restore(self.state.pool, saved, now)

    @property
    def layout(self) -> Layout | None:
        """The pool's layout, or None while there is none."""
        return self.state.pool.layout if self.state.pool else None

    def refusal(self, hello: Hello) -> Refused | None:
        """Why this Hello cannot be served, or None. Changes nothing."""
        return sessions.refusal(self.state, hello)

    def hello(self, now: float, hello: Hello) -> tuple[Welcome | Refused | Session, Effects]:
        """Register a client. For a runner the pool must be attached. The answer may be a session alone: then
        the Welcome is among the messages of these effects, or of later ones.
        """
        refused = self.refusal(hello)
        if refused is not None:
            return refused, self._effects()
        self._date(now)
        answer = sessions.welcome(self.state, hello, now)
        takeover.end_roll_call(self.state, now)
        return answer, self._settle(now)

    def handle(self, now: float, client_id: int, message: ToManager | None) -> Effects:
        """A message under the session of `client_id`, which must be registered; None is a probe.

        One that this kind of client does not send is dropped and counted.
        """
        self._date(now)
        client = self.state.clients[client_id]
        if isinstance(client, Runner):
            client.last_heard = now
            if client.touched and isinstance(message, StepReport):  # most of what comes
                self._report(now, client, message)
                return self._settle(now)
        elif client.touched and not isinstance(message, Submit) and isinstance(message, ASKED):
            if isinstance(message, ExplainQuery | PlanQuery) and self.state.waiting.first is not None:
                self.state.admission_due = True  # as the next tick would: a request may have its turn by now
                self._get_on(now)
            self._ask(now, client, message)
            return self._effects()  # asking changes nothing, so there is nothing to settle
        if not client.touched:
            sessions.confirm(self.state, client)
        if message is not None:
            self._dispatch(now, client, message)
        return self._settle(now)

    def process_died(self, now: float, lock: str) -> Effects:
        """The process that held `lock` is gone. Unknown ones are ignored."""
        self._date(now)
        sessions.gone(self.state, lock, now)
        takeover.end_roll_call(self.state, now)
        return self._settle(now)

    def displaced(self, now: float, lock: str, former: str) -> Effects:
        """The lock has another holder, and the process that held it lives, known as `former` from now on."""
        sessions.displace(self.state, lock, former, now)
        return self._settle(now)

    def copied(self, now: float, copy: Copy, promotion: bool, good: bool, seconds: float) -> Effects:
        """A copy that an effect asked for is over, after `seconds`. A promotion is `good` only if the block
        now holds its content to the last bit.
        """
        self._date(now)
        state = self.state
        assert state.pool is not None
        assert state.tiering is not None
        if promotion:
            state.tiering.promoted(state.pool, copy, good, seconds, now)
        else:
            state.tiering.demoted(state.pool, copy, good, now)
        state.admission_due = True
        return self._settle(now)

    def tick(self, now: float) -> Effects:
        """Called regularly, a few times per second or more."""
        self._date(now)
        state = self.state
        if state.tiering is not None and state.tiering.comebacks:
            state.admission_due = True  # a request that waits for them may have waited long enough
        for runner in state.runners:
            seen = runner.last_heard if runner.ready else now
            state.last_runner_seen = max(state.last_runner_seen, seen)
        if now - state.last_runner_seen >= state.policy.runner_wait:
            reason = submissions.no_runner(state)
            for request in list(state.waiting):
                admission.reject_waiting(state, request, "not_ready", reason, submissions.RETRY_AFTER)
        state.admission_due |= state.waiting.first is not None
        takeover.end_roll_call(state, now)
        pinning.expire(state, now)
        pinning.go_on(state, now)
        for producer in state.in_flight.awaited_producers():
            if now - producer.advanced_at >= state.policy.prefix_wait and state.in_flight.withdraw(producer):
                state.admission_due = True
        self._get_on(now)
        if state.pool is not None:
            self._look_at_events(now, state.pool.log)
        return self._effects()

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for what ticks do, so that they should come sooner."""
        return bool(self.state.pins.jobs or self._too_early)

    def count_dropped(self) -> None:
        """A frame came that is no message."""
        self.state.counters.dropped_messages += 1

    def _dispatch(self, now: float, client: Frontend | Runner, message: ToManager) -> None:
        """The most frequent ones are looked for first."""
        if isinstance(client, Runner):
            self._of_runner(now, client, message)
        else:
            self._of_frontend(now, client, message)

    def _of_runner(self, now: float, runner: Runner, message: ToManager) -> None:
        match message:
            case StepReport():
                self._report(now, runner, message)
            case Ready():
                runner.ready = True
                self.state.admission_due = True
            case Draining():
                pressure.hand_over(self.state, runner)
            case _:
                self.count_dropped()

    def _of_frontend(self, now: float, frontend: Frontend, message: ToManager) -> None:
        match message:
            case Submit():
                submissions.submit(self.state, frontend, message, now)
            case Cancel():
                submissions.cancel(self.state, frontend, message)
            case Claimed():
                if self.state.roll_call is not None:
                    self.state.roll_call.spoke(frontend.hello.lock)
                    takeover.end_roll_call(self.state, now)
            case _ if isinstance(message, Query):
                self._ask(now, frontend, message)
            case _:
                self.count_dropped()

    def _look_at_events(self, now: float, log: EventLog) -> None:
        """Some of those that answers rest on, if anybody asks; of those who asked too early one gets its
        answer.
        """
        if self._too_early or log.is_followed:
            log.catch_up(AT_ONCE)
        log.trim()
        if log.behind <= AT_ONCE and self._too_early:
            client_id, message = self._too_early.pop(0)
            client = self.state.clients.get(client_id)
            if isinstance(client, Frontend):
                self._ask(now, client, message)

    def _ask(self, now: float, client: Frontend, message: Query) -> None:
        state = self.state
        of_events: bool = isinstance(message, ExplainQuery) or getattr(message, "tenant", "") != ""
        of_events &= not isinstance(message, WITHOUT_EVENTS)
        if of_events and state.pool is not None and state.pool.log.behind > AT_ONCE:
            early = self._too_early
            early.append((client.client_id, message))
            if len(early) > MAX_TOO_EARLY:
                del early[long_text.first_of_most([getattr(each, "tenant", "") for _, each in early])]
            return
        match message:
            case StatsQuery():
                state.send(client, introspection.statistics(state, message.query_id, now))
            case _ if introspection.fault(message):
                self.count_dropped()
            case TextPart():
                if state.pool is not None:
                    long_text.take(state, client, message)
            case ExplainQuery() | PlanQuery() | Pin() | Evict() if (
                state.pool is not None and long_text.is_torn(client, message)
            ):
                self.count_dropped()
            case Pin() | Unpin() | PinsQuery():
                pinning.command(state, client, message, now)
            case Evict() | Clear():
                state.send(client, commands.command(state, client, message, now))
                pinning.go_on(state, now)
            case _:
                state.send(client, introspection.answer(state, client, message, now))

    def _report(self, now: float, runner: Runner, report: StepReport) -> None:
        pool = self.state.pool
        assert pool is not None
        check = reports.ReportCheck(runner, pool)
        try:
            check.check(report)
        except reports.InvalidReport as fault:
            self.on_fault(f"runner {runner.hello.name!r} is fenced: {fault}")
            sessions.fence(self.state, runner, now)
        else:
            reports.apply(self.state, runner, report, check, pool, now)

    on_fault: Callable[[str], None] = staticmethod(lambda reason: None)
    """Told why a runner is fenced."""

    def _date(self, now: float) -> None:
        """What changes from here on has changed now."""
        if self.state.pool is not None:
            self.state.pool.log.now = now + self.unix_offset

    def _settle(self, now: float) -> Effects:
        """After every event."""
        self._get_on(now)
        return self._effects()

    def _get_on(self, now: float) -> None:
        """Credits for running sequences first, then new starts, then room is made."""
        state = self.state
        if state.pool is not None:
            starved = pressure.grant_credits(state, state.pool)
            if state.admission_due:
                admission.admit(state, now)
            if starved:
                pressure.relieve(state, now)
            if state.tiering is not None:
                state.tiering.demote_ahead(state.pool, now)

    def _effects(self) -> Effects:
        state = self.state
        for runner in state.runners:
            if runner.draining:
                runner.dismiss()
            directives = runner.outbox.take()
            if directives is not None:
                state.send(runner, directives)
        effects = state.effects
        if state.pool is not None:
            effects.records, state.pool.changed = state.pool.changed, effects.records
            if state.pins.changes:
                effects.pins, state.pins.changes = state.pins.changes, {}
        if state.tiering is not None:
            effects.demotions, effects.promotions = state.tiering.take()
            if state.tiering.tier.erasures:
                effects.erasures, state.tiering.tier.erasures = state.tiering.tier.erasures, []
        state.effects = Effects()
        return effects
