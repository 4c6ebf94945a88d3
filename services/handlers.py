"""What becomes of exceptions: an answer in OpenAI's shape, and a line in the request log."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvmanager.errors import PagekeeperError
from services.errors import INTERNAL, ApiError, from_pagekeeper
from services.request_log import log_refusal


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log_refusal(request, error)
    return error.response()


async def on_pagekeeper_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagekeeperError)
    return await on_api_error(request, from_pagekeeper(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own errors (404, 405) in the same shape."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such route: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}; "
        f"allowed: {(error.headers or {}).get('Allow', 'none')}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def on_unexpected(request: Request, error: Exception) -> Response:
    """A bug: the client learns that it is ours; the traceback goes to the log."""
    return INTERNAL.response()
