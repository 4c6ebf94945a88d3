"""Submits and cancels: what is accepted into the queue, what is refused and why."""

import math

from kvmanager.pool.hashing import tenant_fault
from kvmanager.protocol import (
    MAX_BEAMS,
    MAX_CHOICES,
    MAX_ID_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_TEXT_CHARS,
    Accepted,
    Cancel,
    NotHeld,
    Rejected,
    Submit,
    find_sampling_fault,
)
from kvmanager.scheduling.admission import why_it_never_fits
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Request
from kvmanager.scheduling.searches import find_state_fault
from kvmanager.state import State

RETRY_AFTER = 1.0  # seconds


class Refusal(Exception):
    """Why a request is not accepted: a wire code, the message, and after how many seconds to try again."""

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


def submit(state: State, frontend: Frontend, message: Submit, now: float) -> None:
    """Queue the request and answer Accepted, or answer Rejected. A repeated one changes nothing."""
    if message.claim:
        claim(state, frontend, message)
        return
    if state.roll_call is not None:
        state.roll_call.withdraw(frontend, message.request_id)
    known = frontend.requests.get(message.request_id)
    if known is not None:
        attempt, counted = known.submit.attempt, known.counted
    else:
        attempt, counted = frontend.remembered(message.request_id)
    if message.attempt > attempt or message.attempt < 0:
        try:
            request = accept(state, frontend, message, now)
        except Refusal as refusal:
            state.counters.rejected += 1
            answer = (message.request_id, message.attempt, refusal.code, refusal.message, refusal.retry_after)
            state.send(frontend, Rejected(*answer))
            return
        if known is not None:
            state.cancel(known)
        state.last_serial = request.serial
        request.counted = counted
        frontend.requests[message.request_id] = request
        state.waiting.add(request)
        state.admission_due = True
    state.send(frontend, Accepted(message.request_id, message.attempt))


def claim(state: State, frontend: Frontend, message: Submit) -> None:
    """Note it for the end of the roll call; without one, nothing is held that this manager did not start."""
    roll_call = state.roll_call
    if roll_call is None or find_fault(message) or not roll_call.claim(frontend, message):
        state.send(frontend, NotHeld(((message.request_id, message.attempt),)))


def accept(state: State, frontend: Frontend, message: Submit, now: float) -> Request:
    """Check everything that can be checked now; changes nothing. Raises Refusal."""
    if fault := find_fault(message):
        raise Refusal("invalid_request", fault)
    try:
        request = Request(frontend, message, state.last_serial + 1)
    except OverflowError:
        raise Refusal("invalid_request", "a token id is negative or does not fit 32 bits") from None
    if state.pool is None:
        raise Refusal("not_ready", "no runner has registered yet, so there is no block pool", RETRY_AFTER)
    if now - state.last_runner_seen >= state.policy.runner_wait:
        raise Refusal("not_ready", no_runner(state), RETRY_AFTER)
    if reason := why_it_never_fits(state, request):
        raise Refusal("can_never_fit", reason)
    if len(state.waiting) >= state.policy.max_waiting:
        resumed = any(choice.output_token_ids for choice in message.choices)
        if not resumed:
            raise Refusal(
                "queue_full", f"{len(state.waiting)} requests are waiting, which is the limit", RETRY_AFTER
            )
    return request


def no_runner(state: State) -> str:
    return f"no runner has been there, or made progress, for {state.policy.runner_wait:g} s"


def find_fault(message: Submit) -> str:
    """What is wrong with the fields themselves, or an empty string."""
    choices, max_tokens = message.choices, message.sampling.max_tokens
    if not 1 <= len(message.request_id) <= MAX_ID_CHARS:
        return f"request_id has {len(message.request_id)} characters, want 1 to {MAX_ID_CHARS}"
    if len(message.cache_salt) > MAX_TEXT_CHARS:
        return f"cache_salt has {len(message.cache_salt)} characters, want at most {MAX_TEXT_CHARS}"
    if message.tenant and (fault := tenant_fault(message.tenant)):
        return fault
    if not 1 <= len(message.prompt_token_ids) <= MAX_PROMPT_TOKENS:
        return f"the prompt has {len(message.prompt_token_ids)} tokens, want 1 to {MAX_PROMPT_TOKENS}"
    alone = len(choices) == 1  # as almost always
    if not alone and not 1 <= len({choice.index for choice in choices}) == len(choices) <= MAX_CHOICES:
        return f"{len(choices)} choices, want 1 to {MAX_CHOICES} with different indices"
    for choice in choices:
        if not 0 <= choice.index < MAX_CHOICES:
            return f"a choice index is {choice.index}, want 0 to {MAX_CHOICES - 1}"
        if len(choice.output_token_ids) >= max_tokens:
            return f"max_tokens is {max_tokens}, want at least 1 and more than each choice's output so far"
    searches = message.sampling.beam is not None or message.search is not None
    if searches and (fault := find_search_fault(message)):
        return fault
    if message.attempt < 0 or not math.isfinite(message.arrival):
        return f"attempt {message.attempt} or arrival {message.arrival} is not a usable number"
    return find_sampling_fault(message.sampling)


def find_search_fault(message: Submit) -> str:
    """What is wrong with a beam search, or with where it stands."""
    beam, search = message.sampling.beam, message.search
    outputs = [choice.output_token_ids for choice in message.choices]
    if beam is None:
        return "" if search is None else "the state of a beam search belongs to a request that is none"
    if not 1 <= beam.width <= MAX_BEAMS or [each.index for each in message.choices] != [*range(beam.width)]:
        return f"a beam search of width {beam.width} (1 to {MAX_BEAMS}) wants as many choices"
    if search is None:
        return "a beam search has output and no state" if any(outputs) else ""
    if [path.token_ids for path in search.beams] != outputs:
        return "the beams of a search are not its choices' outputs"
    return find_state_fault(search, beam.width, message.sampling.max_tokens)


def cancel(state: State, frontend: Frontend, message: Cancel) -> None:
    """Drop that very attempt; anything else under the id is left alone."""
    request = frontend.requests.get(message.request_id)
    if request is not None and request.submit.attempt == message.attempt:
        state.cancel(request)
    if state.roll_call is not None:
        state.roll_call.withdraw(frontend, message.request_id)
