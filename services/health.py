"""GET /health (the process lives), /ready (a request would run), /metrics."""

from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from kvmanager.protocol import Stats
from services.context import Context
from services.errors import ApiError

STATS_TIMEOUT: Final = 1.0  # seconds


class HealthRoute:
    """All three endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def ready(self, request: Request) -> Response:
        stats = await self._context.backend.stats(STATS_TIMEOUT)
        missing = what_is_missing(stats, self._context.config.stuck_seconds)
        if missing:
            raise ApiError(503, missing, code="not_ready", headers={"retry-after": "1"})
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        stats = await self._context.backend.stats(STATS_TIMEOUT)
        return Response(
            self._context.metrics.render(stats), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        )


def what_is_missing(stats: Stats | None, stuck_seconds: float) -> str:
    """Why a request would not run now; "" if it would. A runner that gets on is heard of, also when idle."""
    if stats is None:
        return f"the KV manager does not answer (within {STATS_TIMEOUT:g} s)"
    if not stats.runners:
        return "no runner has registered with the KV manager yet"
    ready = [runner for runner in stats.runners if runner.ready and not runner.draining]
    if not ready:
        names = ", ".join(runner.name for runner in stats.runners)
        return f"no runner is ready yet: {names} loading or draining"
    if all(runner.last_report_age > stuck_seconds for runner in ready):
        silent = ", ".join(
            f"{runner.name} (silent for {runner.last_report_age:.1f} s, {runner.running} sequences)"
            for runner in ready
        )
        return f"no runner makes progress: {silent}"
    return ""
