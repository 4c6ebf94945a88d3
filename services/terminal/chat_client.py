"""`pagekeeper chat`: talk with a running server in the terminal.

Ctrl-C stops a reply (the server stops working on it, and what was said so far stays in the conversation),
Ctrl-D leaves. After each reply a line says how many prompt tokens came from the cache, and how fast it was.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from kvmanager.settings import load, setting
from services.terminal.server_errors import ServerError, check, unreachable

MAX_EVENT_BYTES = 16 << 20
_TIMEOUT = httpx.Timeout(
    connect=5.0, read=120.0, write=30.0, pool=5.0
)  # the server breaks silences well before
_HELP = "Ctrl-C stops a reply, Ctrl-D leaves, /new starts over"
_UNSHOWN = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""Control characters: a reply must not move the cursor or change the terminal."""


def parse_url(text: str) -> str:
    """Raises ValueError unless `text` is an http or https URL."""
    url = httpx.URL(text) if text.isprintable() else httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(text)
    return text


@dataclass(frozen=True)
class ChatConfig:
    """A terminal chat with a running server."""

    url: str = setting("http://127.0.0.1:8000", "the server's address", parse=parse_url)
    api_key: str = setting("", "key to send, where the server asks for one")
    model: str = setting("", "the model's name in the API, given by flag only; none: the server's first")
    system: str = setting("", "system prompt; none: the chat template's own")
    temperature: float = setting(0.7, "0 takes the likeliest token every time", minimum=0.0, maximum=2.0)
    max_tokens: int = setting(
        0, "longest reply; 0: what the model's context allows", unit="tokens", minimum=0
    )


@dataclass
class Reply:
    """What one turn brought. Times are seconds from sending."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    first_text: float = 0.0
    last_text: float = 0.0

    def summary(self) -> str:
        """Cached tokens, tokens and speed; without usage (a stopped reply) what is known."""
        if not self.usage:
            return f"{len(self.text)} characters in {self.last_text:.1f} s"
        prompt, tokens = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        span = self.last_text - self.first_text
        speed = f" · {(tokens - 1) / span:.1f} tokens/s" if tokens > 1 and span > 0 else ""
        end = "" if self.finish_reason == "stop" else f" · ended by {self.finish_reason}"
        first = f"first after {self.first_text:.2f} s"
        return f"{cached} of {prompt} prompt tokens cached · {tokens} tokens · {first}{speed}{end}"


class ChatApi:
    """The two routes that a chat needs."""

    def __init__(self, client: httpx.Client, config: ChatConfig) -> None:
        self._client = client
        self._config = config

    def model(self) -> str:
        """The name of the model to ask for. Raises ServerError where there is no such model."""
        names = [entry["id"] for entry in self._get("/v1/models")["data"]]
        if not names or (self._config.model and self._config.model not in names):
            raise ServerError(
                f"the server has no model {self._config.model!r}; it has {', '.join(names) or 'none'}"
            )
        return self._config.model or str(names[0])

    def reply(self, model: str, messages: Sequence[dict[str, str]], reply: Reply) -> Iterator[str]:
        """Ask for the next message; yields its text as it comes, and fills in `reply`. Raises ServerError."""
        options = {"max_tokens": self._config.max_tokens} if self._config.max_tokens else {}
        body = {"model": model, "messages": messages, "temperature": self._config.temperature, **options}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                check(response, "--api-key")
                for event in events(response.iter_bytes()):
                    yield from _take(event, reply, start)
        except httpx.HTTPError as error:
            raise unreachable(self._config.url, error) from None

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise unreachable(self._config.url, error) from None
        check(response, "--api-key")
        return dict(response.json())


def events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`. Raises ServerError where it breaks off.

    Lines are cut at line feeds only: text may hold other characters that count as line ends elsewhere.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield _object(data)
        if len(rest) > MAX_EVENT_BYTES:
            raise ServerError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
    raise ServerError("the server's reply broke off")


def _object(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        raise ServerError(f"the server sent an event that is no JSON object: {data[:200]!r}") from None


def _take(event: dict[str, Any], reply: Reply, start: float) -> Iterator[str]:
    if "error" in event:
        raise ServerError(event["error"]["message"])
    reply.usage = event.get("usage") or reply.usage
    for choice in event.get("choices", ()):
        text = choice["delta"].get("content")
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if text:
            reply.last_text = time.monotonic() - start
            reply.first_text = reply.first_text or reply.last_text
            reply.text += text
            yield text


class Chat:
    """The conversation and the terminal. `read` gives the user's next line, or raises EOFError at its end."""

    def __init__(
        self, api: ChatApi, config: ChatConfig, console: Console, read: Callable[[str], str]
    ) -> None:
        self._api = api
        self._console = console
        self._read = read
        self._opening = [{"role": "system", "content": config.system}] if config.system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self) -> None:
        """Talk until the user leaves. Raises ServerError only where the server cannot be used at all."""
        model = self._api.model()
        self._note(f"{model} · {_HELP}")
        while (line := self._next_line()) is not None:
            if line == "/new":
                self.messages = list(self._opening)
                self._note("a new conversation")
            elif line:
                self._turn(model, line)

    def _next_line(self) -> str | None:
        """`None` when the user leaves; "" when there is nothing to say."""
        try:
            return self._read("> ").strip()
        except EOFError:
            _say(self._console, "", "")
            return None
        except KeyboardInterrupt:
            _say(self._console, "", "")
            return ""

    def _turn(self, model: str, line: str) -> None:
        """One question and its reply; a turn without any reply leaves no trace in the conversation."""
        reply, note = Reply(), ""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            for text in self._api.reply(model, asked, reply):
                self._show(text)
        except KeyboardInterrupt:
            note = "stopped · "
        except ServerError as error:
            _say(self._console, f"\n{error}", "red")
            note = "failed · "
        if reply.text:
            self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        self._note(f"\n{note}{reply.summary()}")

    def _show(self, text: str) -> None:
        """Past rich, which would read `:smile:` and tabs its own way."""
        self._console.file.write(text.translate(_UNSHOWN))
        self._console.file.flush()

    def _note(self, text: str) -> None:
        _say(self._console, text, "dim")


def _say(console: Console, text: str, style: str) -> None:
    console.print(text.translate(_UNSHOWN), style=style, markup=False, emoji=False, highlight=False)


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status, 1 where the server cannot be used."""
    environ = {
        name: value for name, value in os.environ.items() if name != "PAGEKEEPER_MODEL"
    }  # that is a path
    config = load(ChatConfig, "pagekeeper chat", argv, environ)
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    console = Console()
    with httpx.Client(base_url=config.url, headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
        try:
            Chat(ChatApi(client, config), config, console, _line_reader()).run()
        except ServerError as error:
            _say(console, f"pagekeeper chat: {error}", "red")
            return 1
    return 0


def _line_reader() -> Callable[[str], str]:
    """`input`, which edits lines and remembers them once readline is loaded."""
    import readline

    readline.set_history_length(1000)
    return input
