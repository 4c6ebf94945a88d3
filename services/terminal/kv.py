"""`pagekeeper kv …`: ask a running server about its cache from the terminal."""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console, RenderableType
from rich.text import Text

from services.kv.tree import SORTS
from services.terminal import kv_top, kv_views
from services.terminal.chat_client import parse_url
from services.terminal.kv_client import TIMEOUT, Json, KvApi, as_json, shown
from services.terminal.server_errors import Broken, Refused, ServerError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
WIDTH: Final = 140  # characters, where there is no terminal
PAUSES: Final = (1.0, 2.0, 4.0, 8.0)  # seconds before an event stream is tried again
PROMPT_HELP: Final = (
    "the text; a file with -f, or standard input; messages or a whole request as JSON are understood"
)
REQUEST_FIELDS: Final = (
    "cache_salt",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

Command = Callable[[KvApi, argparse.Namespace, Console], int]


class UsageError(Exception):
    """What was typed cannot be meant."""


def make_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command line. `environ` may give the server and the key."""
    common = argparse.ArgumentParser(add_help=False)
    url = environ.get("PAGEKEEPER_URL") or DEFAULT_URL
    common.add_argument(
        "--url", default=url, type=address, help=f"the server [default: {url}; env: PAGEKEEPER_URL]"
    )
    common.add_argument(
        "--key",
        default=environ.get("PAGEKEEPER_KEY", ""),
        help="admin's or tenant's key [env: PAGEKEEPER_KEY]",
    )
    common.add_argument("--json", action="store_true", help="print the server's JSON, one object a line")
    parser = argparse.ArgumentParser(
        prog="pagekeeper kv", description="Ask a running server about its cache."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, run: Command) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}.", parents=[common], allow_abbrev=False
        )
        made.set_defaults(run=run)
        return made

    command("stats", "blocks by state, hit rate, waste, runners", run_stats)
    add_top(command("top", "the same and the requests, live; q ends it", run_top))
    add_tree(command("tree", "the cached prefixes: text, tokens, size, hits", run_tree))
    add_prompt(command("explain", "how much of a prompt would be found, and why not more", run_explain))
    add_pins(command("pins", "list what is pinned, pin a prefix, end a pin", run_pins))
    add_events(command("events", "follow what is stored and removed", run_events))
    return parser


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="between two looks [default: 1]"
    )
    parser.add_argument(
        "--count", type=positive, default=0, metavar="N", help="print N looks, line by line, and end"
    )


def add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=positive, default=3, help="levels that are shown [default: 3]")
    parser.add_argument(
        "--limit", type=positive, default=40, help="most prefixes that are shown [default: 40]"
    )
    parser.add_argument("--sort", choices=SORTS, default="bytes", help="what comes first [default: bytes]")
    parser.add_argument("--parent", default="", metavar="HASH", help="only what continues this prefix")
    parser.add_argument(
        "--search", default="", metavar="TEXT", help="only what contains this text, or leads to it"
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help=PROMPT_HELP)
    parser.add_argument("-f", "--file", metavar="FILE", help="read the text from FILE")
    parser.add_argument("--chat", action="store_true", help="the text is one message of a user")
    parser.add_argument("--raw", action="store_true", help="the text is no JSON, whatever it looks like")
    parser.add_argument("--salt", default="", metavar="SALT", help="the cache_salt of the request")


def add_pins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--add", default="", metavar="NAME", help="pin what is cached of the text under this name"
    )
    parser.add_argument("--remove", default="", metavar="NAME", help="end this pin")
    parser.add_argument(
        "--ttl", type=seconds, default=0.0, metavar="SECONDS", help="how long it holds [default: 3600]"
    )
    add_prompt(parser)


def add_events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--snapshot", action="store_true", help="first what is cached now")
    parser.add_argument("--count", type=positive, default=0, metavar="N", help="end after N events")
    parser.add_argument(
        "--after", default="", metavar="ID", help="go on after the event of this id (boot_id:sequence)"
    )


def address(text: str) -> str:
    """An http or https URL."""
    try:
        return parse_url(text)
    except (ValueError, httpx.InvalidURL):
        raise argparse.ArgumentTypeError(f"{text!r} is no http or https URL") from None


def positive(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """At least a tenth of a second, and finite."""
    with contextlib.suppress(ValueError):
        if 0.1 <= (value := float(text)) < 1e9:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1")


# --- the commands -------------------------------------------------------------------------------------------


def show(console: Console, given: argparse.Namespace, answer: Json, view: RenderableType) -> int:
    """The view, or the server's JSON."""
    if given.json:
        print_json(console, answer)
    else:
        console.print(view)
    return 0


def print_json(console: Console, value: Json) -> None:
    """One line, past rich, which would wrap it."""
    console.file.write(as_json(value) + "\n")
    console.file.flush()


def run_stats(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    answer = api.get("/kv/stats")
    return show(console, given, answer, kv_views.stats(answer))


def run_top(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    top = kv_top.Top(api)
    if console.is_terminal and not (given.json or given.count):
        with kv_top.keys() as key:
            return kv_top.run(top, console, given.interval, key)
    pause = threading.Event()
    for turn in range(given.count or 1):
        if turn:
            pause.wait(given.interval)
        top.look()
        found = top.as_json()
        if given.json:
            print_json(console, found)
        else:
            console.print(Text(kv_top.figures(top)), soft_wrap=True)
    return 0


def run_tree(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    answer = api.get(
        "/kv/prefixes",
        depth=given.depth,
        limit=given.limit,
        sort=given.sort,
        parent=given.parent,
        q=given.search,
    )
    return show(console, given, answer, kv_views.tree(answer, given.search))


def run_explain(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    answer = api.post("/kv/explain", prompt_body(given))
    return show(console, given, answer, kv_views.explanation(answer))


def run_pins(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    if given.add and given.remove:
        raise UsageError("--add and --remove are two commands")
    if not given.add and (given.text is not None or given.file or given.ttl):
        raise UsageError("a text, --file and --ttl are for --add NAME")
    if given.remove:
        answer = api.delete("/kv/pins", name=given.remove)
        return show(console, given, answer, Text(f"{shown(given.remove)} is no longer pinned"))
    if given.add:
        body = {**prompt_body(given), "name": given.add, **({"ttl": given.ttl} if given.ttl else {})}
        answer = api.post("/kv/pins", body)
        held = f"{answer['blocks']} blocks, {answer['tokens']} tokens"
        until = f"for {kv_views.ago(answer['expires_in'])}"
        return show(console, given, answer, Text(f"{shown(given.add)} holds {held}, {until}"))
    answer = api.get("/kv/pins")
    return show(console, given, answer, kv_views.pins(answer))


def run_events(api: KvApi, given: argparse.Namespace, console: Console) -> int:
    """Follow the events; after a break go on behind the last one, unless the first try fails already or the
    server refuses.
    """
    last_id, begun, seen, failures, pause = given.after, False, 0, 0, threading.Event()
    while True:
        try:
            for event in api.events(last_id, given.snapshot and not last_id):
                last_id, failures, seen = event.id or last_id, 0, seen + 1
                if given.json:
                    print_json(console, {"event": event.name, "id": event.id, **event.data})
                else:
                    stamp = float(event.data.get("time") or time.time())
                    clock = time.strftime("%H:%M:%S", time.localtime(stamp))
                    line = kv_views.event(event, clock)
                    console.print(line, overflow="ellipsis", no_wrap=True, soft_wrap=not console.is_terminal)
                if seen == given.count:
                    return 0
        except ServerError as error:
            begun = begun or isinstance(error, Broken)
            if isinstance(error, Refused) or not (begun or last_id):
                raise
            wait = PAUSES[min(failures, len(PAUSES) - 1)]
            print(
                f"pagekeeper kv events: {shown(str(error))}; trying again in {wait:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            failures += 1
            pause.wait(wait)


# --- prompts ------------------------------------------------------------------------------------------------


def prompt_body(given: argparse.Namespace) -> Json:
    """The text of the command line, a file or standard input, as fields of a request. Raises UsageError."""
    if given.text is not None and given.file:
        raise UsageError("give the text or a file, not both")
    if given.file:
        try:
            text = Path(given.file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{given.file} cannot be read: {error}") from None
    elif given.text is not None:
        text = given.text
    elif sys.stdin.isatty():
        raise UsageError("a text is missing: give it, a file with -f, or standard input")
    else:
        text = sys.stdin.read()
    if not text:
        raise UsageError("the text is empty")
    body = as_body(text, chat=given.chat, raw=given.raw)
    return {**body, "cache_salt": given.salt} if given.salt else body


def as_body(text: str, *, chat: bool = False, raw: bool = False) -> Json:
    """A text, messages, token ids, or a whole request of the OpenAI API as fields of a request."""
    if chat:
        return {"messages": [{"role": "user", "content": text}]}
    value = None if raw else parsed(text)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return {"prompt": value}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return {"messages": value}
    if isinstance(value, dict) and ("messages" in value or "prompt" in value):
        kind = "messages" if "messages" in value else "prompt"
        return {name: value[name] for name in (kind, *REQUEST_FIELDS) if name in value}
    return {"prompt": text}


def parsed(text: str) -> object:
    """The JSON, if it is an array or an object."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def make_console() -> Console:
    """The terminal; a file or a pipe gets lines that are wide enough for every column."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status: 1 if the server cannot be asked, 2 for wrong usage."""
    parser = make_parser(os.environ)
    given = parser.parse_args(argv)
    headers = {"authorization": f"Bearer {given.key}"} if given.key else {}
    console, name = make_console(), f"pagekeeper kv {given.command}"
    try:
        with httpx.Client(base_url=given.url, headers=headers, timeout=TIMEOUT, trust_env=False) as client:
            return int(given.run(KvApi(client), given, console))
    except UsageError as error:
        print(f"{name}: {error}; see {name} --help", file=sys.stderr)
        return 2
    except (ServerError, UnicodeEncodeError) as error:
        print(f"{name}: {shown(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # a reader such as head had enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
