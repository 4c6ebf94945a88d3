"""A model's chat template: messages to the text of a prompt, as `transformers` renders it.

Templates come with the model, so they run in jinja's sandbox and within bounds: no more messages, rounds of
loops, output and time than a conversation can need. What a template may use:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmanager.errors import PagekeeperError
from services.text.model_files import ModelError

MAX_MESSAGES = 10_000
MAX_LOOP_ROUNDS = 1_000_000  # of `range`, in one rendering
MAX_GROWTH_CHARS = 1_000_000  # what a template may add to the messages, beside repeating each of them once
MAX_SECONDS = 5.0


class ChatTemplate:
    """One compiled template; safe to share between threads."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """`named_tokens` are what the template knows as `bos_token` and so on. Raises ModelError."""
        self._named_tokens = dict(named_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. With `continue_final_message` it ends inside the last message, for the model to go on.

        Content is text or a list of text parts; `variables` are further names for the template. Raises
        PagekeeperError (`invalid_request`) for messages that the template, or this server, cannot take.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise _invalid(f"{len(messages)} messages; want 1 to {MAX_MESSAGES}")
        if continue_final_message and add_generation_prompt:
            raise _invalid(
                "continue_final_message and add_generation_prompt exclude each other; give one of them"
            )
        plain = [_plain(message) for message in messages]
        if continue_final_message:
            return self._continued(plain, variables)
        return self._run(plain, {**variables, "add_generation_prompt": add_generation_prompt})

    def _continued(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """A mark after the last message shows where the template has put its end, and if it was trimmed."""
        mark = f"{secrets.token_hex(16)} "
        messages[-1]["content"] += mark
        text, found, rest = self._run(messages, {**variables, "add_generation_prompt": False}).rpartition(
            mark.strip()
        )
        if not found:
            raise _invalid("the model's chat template leaves out the last message, so it cannot be continued")
        return text if rest.startswith(" ") else text.rstrip()

    def _run(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        given = sum(len(message["content"]) for message in messages)
        budget = _Budget(2 * given + MAX_GROWTH_CHARS)
        names = {"tools": None, "documents": None, **self._named_tokens, **variables, "messages": messages}
        try:
            return "".join(
                [budget.spend(text) for text in self._template.generate(**names, range=budget.range)]
            )
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error) or type(error).__name__
            raise _invalid(f"the model's chat template refuses these messages: {reason[:1000]}") from None


def _invalid(message: str) -> PagekeeperError:
    return PagekeeperError("invalid_request", message)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content as one text; keys without a value left out, as templates test whether a key is there."""
    known = {key: value for key, value in message.items() if value is not None}
    return {**known, "content": _text(message.get("content"))}


def _text(content: Any) -> str:
    """Text parts are put together with a line break between them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise _invalid(f"content is a {type(content).__name__}; want text or a list of text parts")
    return "\n".join([_part_text(part) for part in content])


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise _invalid(f"content part of type {kind!r} is not supported; want parts of type 'text'")
    if not isinstance(part.get("text"), str):
        raise _invalid("content part of type 'text' has no text")
    return str(part["text"])


class _Budget:
    """What one rendering may still use."""

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._rounds = MAX_LOOP_ROUNDS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, text: str) -> str:
        self._chars -= len(text)
        self._check(self._chars, "its output is far longer than the messages")
        return text

    def range(self, *bounds: int) -> range:
        """The template's `range`."""
        rounds = range(*bounds)
        self._rounds -= len(rounds) + 1
        self._check(self._rounds, f"it loops more than {MAX_LOOP_ROUNDS} times")
        return rounds

    def _check(self, left: int, reason: str) -> None:
        if left < 0:
            raise jinja2.TemplateError(reason)
        if time.monotonic() > self._deadline:
            raise jinja2.TemplateError(f"it takes more than {MAX_SECONDS} seconds")


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what training learns from; for a prompt its content is simply there."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
