"""At the end of each call: one structured line (JSON), and its figures for `/metrics`."""

import json
import logging
import time
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

from services.api.call import Call
from services.api.generation import Generation
from services.context import Context
from services.errors import ApiError, from_pagekeeper
from services.metrics import E2E, OUTPUT_LENGTH, PROMPT_LENGTH, REQUESTS, TPOT, Metrics

LOGGED: Final = "logged"  # key in the request's state: its line is written

log = logging.getLogger("pagekeeper.requests")


def log_call(
    context: Context, call: Call, *, request_id: str, status: int, error: ApiError | None, now: float
) -> None:
    """`now` is in seconds of CLOCK_MONOTONIC; `status` is the HTTP status, 499 if the client went away."""
    reasons = [_reason(output.finish_reason, error) for g in call.generations for output in g.request.outputs]
    for generation in call.generations:
        _measure(context.metrics, generation, _reason(generation.request.outputs[0].finish_reason, error))
    if context.config.request_log:
        log.info("%s", json.dumps(_line(call, request_id, status, error, reasons, now)))


def log_answer(context: Context, call: Call, scope: Scope, status: int) -> None:
    """The line of a call that this connection has answered."""
    state = scope.setdefault("state", {})
    state[LOGGED] = True
    log_call(
        context,
        call,
        request_id=state.get("request_id", ""),
        status=status,
        error=None if call.error is None else from_pagekeeper(call.error),
        now=time.monotonic(),
    )


def log_refusal(request: Request, error: ApiError) -> None:
    """A POST that was refused before it became a call; one that failed later has its line already."""
    state = request.scope.get("state", {})
    if request.method == "POST" and request.app.state.request_log and not state.get(LOGGED):
        line = {
            "request_id": state.get("request_id", ""),
            "route": request.url.path,
            "status": error.status,
            "error": error.message,
        }
        log.info("%s", json.dumps(line))


def _reason(finish_reason: str | None, error: ApiError | None) -> str:
    if error is not None:
        return "error"
    return finish_reason or "abort"


def _measure(metrics: Metrics, generation: Generation, reason: str) -> None:
    metrics.count(REQUESTS, 1, reason)
    metrics.observe(PROMPT_LENGTH, len(generation.request.prompt_token_ids))
    metrics.observe(OUTPUT_LENGTH, generation.num_output_tokens)
    if generation.first_token_at is not None:
        metrics.observe(E2E, generation.last_token_at - generation.request.arrival)
    if generation.mean_gap is not None:
        metrics.observe(TPOT, generation.mean_gap)


def _line(
    call: Call, request_id: str, status: int, error: ApiError | None, reasons: list[str], now: float
) -> dict[str, object]:
    generations = call.generations
    arrival = generations[0].request.arrival
    firsts = [g.first_token_at for g in generations if g.first_token_at is not None]
    gaps = [gap * 1000 for g in generations if (gap := g.mean_gap) is not None]
    line: dict[str, object] = {
        "request_id": request_id,
        "id": call.id,
        "route": call.route,
        "stream": call.stream,
        "status": status,
        "finish_reason": reasons[0] if len(reasons) == 1 else reasons,
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": max(0, call.output_tokens),
        "ttft_ms": round((min(firsts) - arrival) * 1000, 2) if firsts else None,
        "itl_ms": round(sum(gaps) / len(gaps), 2) if gaps else None,
        "e2e_ms": round((now - arrival) * 1000, 2),
    }
    if error is not None:
        line["error"] = error.message
    return line
