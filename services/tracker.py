"""All live requests of one frontend, as a state machine without I/O: `event(now, …) → Effects`.

A request is sent to the manager (`Submit`), accepted or rejected, and produces tokens, which runners send
with their position: what came twice is dropped, what does not continue what is here is refused. When a
runner dies, or the manager does, the request is submitted again with the tokens received so far, so its
client sees no gap and no repeat. Times are seconds of CLOCK_MONOTONIC.
"""

from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import (
    MAX_VOCABULARY,
    Accepted,
    BeamScore,
    Cancel,
    Choice,
    Claimed,
    NotHeld,
    Rejected,
    RunnerLost,
    SamplingParams,
    SearchState,
    Submit,
    TokenBatch,
    TokenEvent,
    TokenLogprobs,
)

MAX_LOSSES: Final = (
    3  # runners that may die under one request, without a new token between, before it is given up
)
STOOD_STILL: Final = 5.0  # seconds between two ticks; far more than a loop that runs ever takes


@dataclass(slots=True, eq=False)
class Output:
    """What one choice has produced. `stop_reason` is the stop token's id, or the stop string found."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    beam: BeamScore | None = None  # once a beam search is over


@dataclass(slots=True, eq=False)
class Request:
    """One live request; `outputs[i]` is choice i. `attempt` is -1 until it was first sent."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    outputs: list[Output]
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    read_cache: bool = True
    tenant: str = ""  # whose cache it uses: see services.auth
    attempt: int = -1
    accepted: bool = False
    losses: int = 0  # in a row, without a new token between
    last_sign: float = 0.0  # when it was last sent, accepted, or produced a token
    retry_at: float | None = None  # when a resubmission that found the queue full goes out again
    num_cached_tokens: int = 0
    search: SearchState | None = None  # where a beam search stands, as far as a runner has told
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: PagekeeperError | None = None

    @property
    def done(self) -> bool:
        """No more tokens will come."""
        return self.error is not None or all(output.finish_reason for output in self.outputs)

    @property
    def may_run(self) -> bool:
        """Whether its attempt was sent, and not refused."""
        return self.attempt >= 0 and self.retry_at is None

    @property
    def started(self) -> bool:
        return self.search is not None or any(output.token_ids for output in self.outputs)

    @property
    def unfinished(self) -> tuple[Choice, ...]:
        """What is to be submitted: choices with their output so far, or the beams of a search."""
        if self.search is not None:
            return tuple(Choice(index, path.token_ids) for index, path in enumerate(self.search.beams))
        return tuple(
            Choice(output.index, tuple(output.token_ids))
            for output in self.outputs
            if output.finish_reason is None
        )


@dataclass(slots=True)
class Effects:
    """What the shell must do: messages for the manager, and the requests whose readers have something to
    see.
    """

    send: list[Submit | Claimed | Cancel] = field(default_factory=list)
    changed: list[Request] = field(default_factory=list)


class Tracker:
    """`timeout` (seconds) bounds every wait for the manager; `max_requests` bounds how many are live at
    once.
    """

    def __init__(self, timeout: float, max_requests: int) -> None:
        self.timeout = timeout
        self.max_requests = max_requests
        self.live: dict[str, Request] = {}
        self.connected = False
        self.last_heard = 0.0
        self.stale_events = 0  # token events of an earlier attempt, or of a request that has ended
        self.resubmitted = 0
        self._last_tick: float | None = None

    # --- from the client ----------------------------------------------------------------------------------

    def submit(self, now: float, request: Request) -> Effects:
        """Take a new request. Raises PagekeeperError ("queue_full") at the limit."""
        if len(self.live) >= self.max_requests:
            raise PagekeeperError(
                "queue_full", f"this frontend serves {self.max_requests} requests, its limit; try again", 1.0
            )
        assert request.request_id not in self.live, f"{request.request_id} is submitted twice"
        self.live[request.request_id] = request
        request.last_sign = now
        if self._last_tick is None:  # it may stand still before its first tick, too
            self._last_tick = now
        return Effects(send=[self._submission(now, request)] if self.connected else [])

    def cancel(self, request: Request) -> Effects:
        """Forget a request, whatever its state; harmless after its end."""
        if self.live.pop(request.request_id, None) is None or request.attempt < 0:
            return Effects()
        return Effects(send=[Cancel(request.request_id, request.attempt)])

    def give_up(self, error: PagekeeperError) -> Effects:
        """This process cannot go on: every live request ends with `error`."""
        effects = Effects()
        for request in list(self.live.values()):
            self._fail(effects, request, error)
        return effects

    def stop(self, request: Request, index: int, stop_reason: str) -> Effects:
        """Choice `index` ends here (a stop string); later tokens of it are dropped. The last one cancels
        the rest.
        """
        output = request.outputs[index]
        output.finish_reason, output.stop_reason = "stop", stop_reason
        return self.cancel(request) if request.done else Effects()

    # --- from the manager ---------------------------------------------------------------------------------

    def connect(self, now: float) -> Effects:
        """A new session: what may run is claimed, oldest first, and what does not is submitted (again)."""
        self.connected = True
        self.last_heard = now
        requests = self._in_order()
        effects = Effects(send=[self._claim(now, each) for each in requests if each.may_run])
        effects.send.append(Claimed())
        effects.send += [self._submission(now, each) for each in requests if not each.may_run]
        return effects

    def disconnect(self) -> None:
        """The session has ended; requests wait (bounded by `timeout`) for the next one."""
        self.connected = False

    def heard(self, now: float, message: object) -> Effects:
        """Anything that the manager said."""
        self.last_heard = now
        match message:
            case Accepted(request_id, attempt):
                request = self._current(request_id, attempt)
                if request is not None:
                    request.accepted, request.last_sign = True, now
            case Rejected():
                return self._rejected(now, message)
            case RunnerLost(requests):
                return self._runner_lost(now, requests)
            case NotHeld(requests):
                known = [self._current(*each) for each in requests]
                return Effects(send=[self._submission(now, each) for each in known if each is not None])
        return Effects()

    def tick(self, now: float) -> Effects:
        """Give up what has waited too long, send again what was to be retried.

        If this process stood still (it was stopped, or the machine slept), runners may have dropped tokens, a
        last one among them, and nobody else is late: everything is submitted again.
        """
        before, self._last_tick = self._last_tick, now
        if before is not None and now - before > STOOD_STILL:
            for request in self.live.values():
                request.last_sign = now
            again = self._in_order() if self.connected else []
            return Effects(send=[self._submission(now, request) for request in again])
        effects = Effects()
        for request in list(self.live.values()):
            since = max(request.last_sign, self.last_heard) if request.accepted else request.last_sign
            if now - since > self.timeout:
                self._fail(effects, request, self._absent(request))
            elif request.retry_at is not None and now >= request.retry_at and self.connected:
                effects.send.append(self._submission(now, request, keep_waiting=True))
        return effects

    # --- from the runners ---------------------------------------------------------------------------------

    def tokens(self, now: float, batch: TokenBatch) -> Effects:
        """New tokens, one message per runner and step."""
        effects = Effects()
        for event in batch.events:
            request = self._current(event.request_id, event.attempt)
            if request is None or not _is_sound(request, event):
                self.stale_events += 1
                continue
            if event.finish_reason == "error":
                self._fail(effects, request, PagekeeperError("invalid_request", event.error))
                continue
            output = request.outputs[event.choice]
            if event.position > len(output.token_ids) and output.finish_reason is None:
                self._lost(now, effects, request, "tokens were lost on the way")
                continue
            request.accepted, request.last_sign = True, now
            _append(request, output, event)
            if event.search is None:
                effects.changed.append(request)
            if request.done:
                del self.live[request.request_id]
        return effects

    # --- inside -------------------------------------------------------------------------------------------

    def _current(self, request_id: str, attempt: int) -> Request | None:
        request = self.live.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def _in_order(self) -> list[Request]:
        return sorted(self.live.values(), key=lambda request: request.arrival)

    def _submission(self, now: float, request: Request, *, keep_waiting: bool = False) -> Submit:
        """As a new attempt."""
        request.attempt += 1
        self.resubmitted += request.attempt > 0
        return self._message(request.last_sign if keep_waiting else now, request)

    def _claim(self, now: float, request: Request) -> Submit:
        """As the attempt that may run, and may have given more tokens than have come here."""
        return structs.replace(self._message(now, request), claim=True)

    def _message(self, sent: float, request: Request) -> Submit:
        request.accepted, request.retry_at, request.last_sign = False, None, sent
        return Submit(
            request_id=request.request_id,
            attempt=request.attempt,
            arrival=request.arrival,
            prompt_token_ids=request.prompt_token_ids,
            choices=request.unfinished,
            sampling=request.sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            read_cache=request.read_cache or request.started,  # the prompt's log-probabilities are there then
            tenant=request.tenant,
            search=request.search,
        )

    def _rejected(self, now: float, message: Rejected) -> Effects:
        effects = Effects()
        request = self._current(message.request_id, message.attempt)
        if request is None:
            return effects
        if request.attempt > 0 and message.retry_after > 0:  # it had a place before: worth another try
            request.retry_at = now + message.retry_after
        else:
            error = PagekeeperError(message.code, message.message, message.retry_after)
            request.attempt = -1  # nothing of it is left at the manager
            self._fail(effects, request, error)
        return effects

    def _runner_lost(self, now: float, requests: tuple[tuple[str, int], ...]) -> Effects:
        effects = Effects()
        for request_id, attempt in requests:
            request = self._current(request_id, attempt)
            if request is not None:
                self._lost(now, effects, request, "the runner died")
        return effects

    def _lost(self, now: float, effects: Effects, request: Request, why: str) -> None:
        request.losses += 1
        if request.losses > MAX_LOSSES:
            message = f"given up after {request.losses} attempts: {why} each time"
            self._fail(effects, request, PagekeeperError("internal", message))
        else:
            effects.send.append(self._submission(now, request))

    def _fail(self, effects: Effects, request: Request, error: PagekeeperError) -> None:
        request.error = error
        effects.send += self.cancel(request).send if self.connected else []
        self.live.pop(request.request_id, None)
        effects.changed.append(request)

    def _absent(self, request: Request) -> PagekeeperError:
        what = "accept the request" if not request.accepted else "answer"
        return PagekeeperError(
            "manager_absent", f"the KV manager did not {what} within {self.timeout:g} s", 1.0
        )


def _is_sound(request: Request, event: TokenEvent) -> bool:
    """Whether the event can be one of the request's."""
    ids = event.token_ids
    if not 0 <= event.choice < len(request.outputs) or event.position < 0:
        return False
    return not ids or 0 <= min(ids) <= max(ids) < MAX_VOCABULARY


def _append(request: Request, output: Output, event: TokenEvent) -> None:
    """Take what `event` adds to `output`; what is already here is left out."""
    if output.finish_reason is not None:
        return
    skip = len(output.token_ids) - event.position
    if len(event.token_ids) > skip:
        request.losses = 0
    if not request.started:
        request.num_cached_tokens = event.num_cached_tokens
    output.token_ids.extend(event.token_ids[skip:])
    if event.logprobs is not None:
        output.logprobs.extend(event.logprobs[skip:])
    if request.prompt_logprobs is None:
        request.prompt_logprobs = event.prompt_logprobs
    if event.search is not None and _length(event.search) > _length(request.search):
        request.search, request.losses = event.search, 0
    if event.position + len(event.token_ids) >= len(output.token_ids):
        output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        output.beam = event.beam


def _length(search: SearchState | None) -> int:
    """Tokens of each beam. A search that began anew on its way may be behind what is known of it."""
    return len(search.beams[0].token_ids) if search is not None and search.beams else 0
