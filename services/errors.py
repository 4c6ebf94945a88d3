"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` with a status."""

from typing import Final

import msgspec
from starlette.responses import Response

from kvmanager.errors import HTTP_STATUS, PagekeeperError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorBody(msgspec.Struct):
    """What is inside `{"error": …}`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """An answer other than 200. `param` names the field that is wrong; `headers` go out with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON of this error."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return msgspec.json.encode(ErrorEnvelope(ErrorBody(self.message, kind, self.param, self.code)))

    def again(self) -> "ApiError":
        """A fresh one, to raise where this one is kept."""
        return ApiError(
            self.status, self.message, param=self.param, code=self.code, headers=dict(self.headers)
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


INTERNAL: Final = ApiError(500, "internal error; the server's log has the details", code="internal")
STOPPING: Final = ApiError(503, "this frontend is stopping; send the request again", code="stopping")


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about the field `param`."""
    return ApiError(400, message, param=param, code=code)


def from_pagekeeper(error: PagekeeperError) -> ApiError:
    """The manager's refusal as HTTP; `retry_after` becomes a `Retry-After` header in whole seconds."""
    status = HTTP_STATUS.get(error.code, 500)
    headers = {"retry-after": str(max(1, round(error.retry_after)))} if status == 503 else {}
    code = "context_length_exceeded" if error.code == "can_never_fit" else error.code
    return ApiError(status, error.message, code=code, headers=headers)
