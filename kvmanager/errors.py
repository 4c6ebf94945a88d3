"""Errors that cross a process boundary: each has a wire code, an HTTP status and says what to do next."""

from typing import Final

HTTP_STATUS: Final[dict[str, int]] = {
    "can_never_fit": 400,  # needs more blocks than the pool has, or more tokens than the model takes
    "invalid_request": 400,  # a field the manager itself cannot accept
    "not_found": 404,  # a pin of that name
    "not_cached": 409,  # nothing of what is to be pinned is in the cache
    "in_use": 409,  # what is to be cleared
    "pin_budget": 409,  # more would be pinned than the setting allows
    "pin_busy": 503,  # a live request would no longer fit beside the pin
    "queue_full": 503,  # the waiting queue is at its limit
    "not_ready": 503,  # no runner has registered yet
    "manager_absent": 503,  # the manager did not answer in time
    "journal_unavailable": 503,  # a stream that is to be resumable, and nowhere to keep it
    "stopping": 503,  # the frontend ends
    "internal": 500,
}
"""Wire code → HTTP status."""


class PagekeeperError(Exception):
    """An operating error: `code` is a key of HTTP_STATUS; `retry_after` is in seconds (0: trying again
    cannot help).
    """

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after
