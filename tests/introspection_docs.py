"""Writes docs/introspection.md, with a real server's answers:
`python -m tests.introspection_docs > docs/introspection.md`.

Numbers that change from run to run (times, ids, hashes) make each run's page another one; the tests look
only at which routes it shows.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.e2e.server import Server
from tests.introspection_story import STORIES, Page

MAX_ITEMS = 4  # of a list; more are left out and counted
MAX_TEXT = 160  # characters of a string
WHOLE = ("advice", "message")  # but these are never cut


def short(value: Any) -> Any:
    """The answer without what would make it long; what is left out is counted."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "…"
    if isinstance(value, dict):
        return {name: item if name in WHOLE else short(item) for name, item in value.items()}
    if isinstance(value, list):
        kept = [short(item) for item in value[:MAX_ITEMS]]
        return kept if len(value) <= MAX_ITEMS else [*kept, f"… {len(value) - MAX_ITEMS} more"]
    return value


def lay_out(value: Any, indent: int = 0) -> str:
    """JSON, an object per line where it fits."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= 120 or not isinstance(value, dict | list) or not value:
        return flat
    space = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {lay_out(item, indent + 2)}" for name, item in value.items()]
        begin, end = "{", "}"
    else:
        items = [lay_out(item, indent + 2) for item in value]
        begin, end = "[", "]"
    lines: list[str] = []
    for item in items:  # short ones share a line
        if lines and len(lines[-1]) + len(item) + 2 + indent <= 110 and "\n" not in lines[-1] + item:
            lines[-1] += ", " + item
        else:
            lines.append(item)
    return begin + "\n" + ",\n".join(space + line for line in lines) + "\n" + " " * indent + end


class Recorder(Page):
    """Asks a server, and keeps what was asked and answered as Markdown."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.model = server.model

    def ask(self, method: str, path: str, body: Any = None, *, quiet: bool = False, lines: int = 0) -> Any:
        """`quiet` shows nothing; `lines`: of a stream, so many are read."""
        url = f"{self._server.url}{path}"
        body = {} if body is None and method == "POST" else body
        if lines:
            answer, text = None, self._stream(url, lines)
        else:
            response = httpx.request(method, url, json=body, timeout=120)
            answer = response.json()
            text = lay_out(short(answer))
            if response.status_code >= 400:
                text = f"HTTP {response.status_code}\n{text}"
        if not quiet:
            self.parts.append(f"```\n{command(method, path, body)}\n{text}\n```")
        return answer

    @contextmanager
    def running(self, body: Any) -> Iterator[None]:
        url = f"{self._server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            while "content" not in next(lines):
                continue
            yield

    def _stream(self, url: str, lines: int) -> str:
        shown: list[str] = []
        with httpx.stream("GET", url, timeout=60) as answer:
            for line in answer.iter_lines():
                name, _, data = line.partition(": ")
                shown.append(f"data: {json.dumps(short(json.loads(data)))}" if name == "data" else line)
                if len(shown) >= lines:
                    return "\n".join(shown).rstrip()
        raise AssertionError("the stream ended")


def command(method: str, path: str, body: Any) -> str:
    """As one would type it."""
    words = ["$ curl -s"]
    if method not in ("GET", "POST"):
        words.append(f"-X {method}")
    quoted = f"'127.0.0.1:8000{path}'" if "?" in path else f"127.0.0.1:8000{path}"
    words.append(quoted)
    if body is not None:
        words.append("-d " + shlex.quote(json.dumps(short(body), ensure_ascii=False)))
    return " ".join(words)


def pages() -> Iterator[str]:
    with Server(pool_bytes="120M", dtype="float32", keep_alive_seconds=1) as server:
        for story in STORIES:
            page = Recorder(server)
            story(page)
            yield from page.parts


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(pages()) + "\n")
