"""What the commands of `pagekeeper kv` ask of a server: JSON, and the stream of events."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from services.terminal.server_errors import Broken, ServerError, check, unreachable

Json = dict[str, Any]

TIMEOUT: Final = httpx.Timeout(connect=5.0, read=15.0, write=15.0, pool=5.0)
SILENCE: Final = 60.0  # seconds without a byte after which a stream of events is given up
MAX_EVENT_BYTES: Final = 16 << 20
MAX_PAGES: Final = 8
_UNSHOWN: Final = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
_TURNING: Final = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_DIRECTIONS: Final = dict.fromkeys(_TURNING, "\ufffd")


def shown(text: str) -> str:
    """Text of a prompt for a terminal: it moves no cursor and turns no direction."""
    return text.translate(_UNSHOWN).translate(_DIRECTIONS)


def as_json(value: Json) -> str:
    """On one line; what `shown` does not show stands there as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text.translate({code: f"\\u{code:04x}" for code in (*_UNSHOWN, *_DIRECTIONS)})


def one_line(text: str) -> str:
    """The same, with its line ends and tabs made visible."""
    return shown(text.replace("\r\n", "\n")).replace("\n", "⏎").replace("\t", "⇥")


@dataclass(frozen=True)
class Event:
    """One server-sent event. `id` is empty where it has none."""

    name: str
    data: Json
    id: str


class KvApi:
    """A server's /kv/… routes. Every method raises ServerError."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **query: object) -> Json:
        given = {name: str(value) for name, value in query.items() if value not in ("", None)}
        return self._json("GET", path, params=given)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        return self._json("POST", path, json=body)

    def delete(self, path: str, **query: str) -> Json:
        return self._json("DELETE", path, params=query)

    def counters(self) -> dict[str, float]:
        """Tokens computed so far, of /metrics: name → the sum over its labels."""
        text = self._request("GET", "/metrics").text
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^(vllm:\w+_tokens_total)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def live_requests(self) -> list[Json]:
        """Those that have not ended, without block tables; as many as MAX_PAGES pages hold."""
        found: list[Json] = []
        cursor = ""
        for _ in range(MAX_PAGES):
            answer = self.get("/kv/requests", state="live", cursor=cursor)
            found += answer["requests"]
            cursor = answer["next_cursor"]
            if not cursor:
                break
        return found

    def events(self, last_id: str, snapshot: bool) -> Iterator[Event]:
        """The stream of events, until it breaks off, which is `Broken`."""
        headers = {"last-event-id": last_id} if last_id else {}
        path = f"/kv/events?snapshot={int(snapshot)}"
        timeout, begun = httpx.Timeout(5.0, read=SILENCE), False
        try:
            with self._client.stream("GET", path, headers=headers, timeout=timeout) as response:
                check(response, "--key or PAGEKEEPER_KEY")
                begun = True
                yield from read_events(response.iter_bytes())
        except httpx.HTTPError as error:
            if begun:
                raise Broken(f"the stream of events broke off ({error})") from None
            raise unreachable(self._client.base_url, error) from None

    def _json(self, method: str, path: str, **options: Any) -> Json:
        response = self._request(method, path, **options)
        try:
            return dict(response.json())
        except (ValueError, TypeError):
            raise ServerError(f"{path}: the answer is no JSON object; is this a Pagekeeper?") from None

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise unreachable(self._client.base_url, error) from None
        check(response, "--key or PAGEKEEPER_KEY")
        return response


def read_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Server-sent events. Lines are cut at line feeds only: text may hold other characters that count as line
    ends elsewhere. Raises ServerError at the end of the stream, which is none that the server meant.
    """
    rest, fields = b"", {"event": b"", "data": b"", "id": b""}
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if not line.strip():
                if fields["data"]:
                    yield _event(fields)
                fields = {"event": b"", "data": b"", "id": b""}
            elif (key := name.decode("latin-1")) in fields:
                fields[key] = value.removeprefix(b" ")
        if len(rest) > MAX_EVENT_BYTES:
            raise ServerError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
    raise Broken("the stream of events ended")


def _event(fields: Mapping[str, bytes]) -> Event:
    try:
        data = dict(json.loads(fields["data"]))
    except (ValueError, TypeError):
        shown_data = fields["data"][:200]
        raise ServerError(f"the server sent an event that is no JSON object: {shown_data!r}") from None
    if fields["event"] == b"error":
        raise Broken(str(data.get("error", {}).get("message", "the server ended the stream")))
    return Event(fields["event"].decode("utf-8", "replace"), data, fields["id"].decode("utf-8", "replace"))
