"""What the terminal says when the server refuses, fails or cannot be reached."""

import httpx


class ServerError(Exception):
    """The server refused, failed or cannot be reached; the message says which, and what to do."""


class Refused(ServerError):
    """The server would refuse the same again."""


class Broken(ServerError):
    """A stream that had begun broke off."""


def check(response: httpx.Response, key_option: str) -> None:
    """Raises ServerError with the server's own words unless it answered 200."""
    if response.status_code == 200:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    hint = f"; give {key_option}" if response.status_code == 401 else ""
    kind = Refused if response.status_code in (400, 401, 403, 404) else ServerError
    raise kind(f"the server answered {response.status_code}: {message}{hint}")


def unreachable(url: object, error: httpx.HTTPError) -> ServerError:
    reason = str(error) or type(error).__name__
    return ServerError(
        f"no answer from {url} ({reason}); is `pagekeeper serve` running there? --url names another"
    )
