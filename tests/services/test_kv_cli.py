"""`pagekeeper kv` against a real frontend with a naive cache behind it, and against servers that fail."""

import contextlib
import io
import json
import os
import pty
import re
import select
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from kvmanager.protocol import Pinned, PinsAnswer
from services.auth import tenant_of
from services.terminal import kv, kv_top
from services.terminal.kv import main
from services.terminal.kv_client import Event, KvApi
from services.terminal.server_errors import Broken, ServerError
from tests.services.fake_cache import FakeCache, request
from tests.services.fake_stack import Stack, served_model, wait_until

TEXT = "Hello there! You are a helpful assistant of the library. It is 10:41 now, and it closes at nine. " * 2
OTHER = TEXT.replace("10:41", "10:42", 1)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(admin_keys="root", tenant_keys="acme,hooli") as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    boot = shared.manager.cache.boot_id
    shared.manager.cache = FakeCache()
    shared.manager.cache.boot_id = boot + "x"
    return shared


@pytest.fixture
def run(stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("PAGEKEEPER_URL", stack.url)
    monkeypatch.setenv("PAGEKEEPER_KEY", "root")
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest's workers set it

    def run(*argv: str, typed: str = "") -> tuple[int, str, str]:
        """Status, output, errors of a command whose output is a pipe."""
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(argv)
        return (status, *capsys.readouterr())

    return run


def cached(stack: Stack, text: str, **options: str) -> list[int]:
    return stack.manager.cache.store(served_model().tokenizer.encode(text), **options)


def test_stats(run: Run) -> None:
    status, output, errors = run("stats")
    assert (status, errors) == (0, "")
    for words in (
        "100 blocks of 16 tokens, 400 KiB",
        "in use 20  being written 10  cached 9  quarantined 1  free 60",
        "25.0% of the slots",
        "40.0%: 400 of 1,000 prompt tokens",
        "3 waiting, 5 preempted, 7 rejected",
        "runner-0 ready",
        "0 of at most 25 blocks",
    ):
        assert words in output
    assert "\x1b" not in output


def test_a_tenant_sees_its_own_stats(run: Run) -> None:
    status, output, _ = run("stats", "--key=hooli")
    assert status == 0
    assert "0 running, 0 waiting" in output
    assert "hit rate" not in output


def test_json_is_what_the_server_said(run: Run, stack: Stack) -> None:
    cached(stack, TEXT)
    for argv in (
        ["stats"],
        ["tree"],
        ["pins"],
        ["explain", TEXT],
        ["top", "--count=1"],
        ["events", "--count=1"],
    ):
        if argv[0] == "events":
            argv.append("--snapshot")
        status, output, _ = run(*argv, "--json")
        (line,) = output.splitlines()
        assert (status, "boot_id" in line) == (0, argv != ["pins"])
        assert isinstance(json.loads(line), dict)


def test_the_tree_in_its_order(run: Run, stack: Stack) -> None:
    """Asked by a tenant, for whom nothing was read of an earlier test's cache."""
    own = tenant_of(b"acme")
    cached(stack, TEXT * 2 + "and one more thing", tenant=own)
    cached(stack, TEXT * 2 + "\x1b[2J\u202efrom afar", tenant=own)
    cached(stack, "Something else entirely, which is short.", tenant=own)
    status, output, _ = run("tree", "--key=acme")
    assert status == 0
    lines = output.splitlines()
    assert lines[0].split() == ["text", "tokens", "size", "hits", "in", "use", "age"]
    assert [line[:3] for line in lines[1:]] == ["▾ H", "  ·", "  ·", "· S"]
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert run("tree", "--key=acme", "--depth=1")[1].count("▾ ") == 1
    assert "and 3 more: see --limit" in run("tree", "--key=acme", "--limit=1")[1]
    found = run("tree", "--key=acme", "--search=ENTIRELY")[1].splitlines()
    assert [line[:3] for line in found[1:]] == ["· S"]
    assert run("tree", "--key=acme", "--search=nowhere")[1] == "nothing that is cached contains it\n"


def test_explain_says_where_a_prompt_leaves_what_is_cached(run: Run, stack: Stack) -> None:
    cached(stack, OTHER)
    status, output, _ = run("explain", TEXT)
    assert status == 0
    assert re.search(r"^\d+ of \d+ tokens would be found", output)
    assert "█▒░" in output
    assert "cached, in block 0" in output or "cached, in block 1" in output
    yours, theirs = re.findall(r"⟦(.*?)(?:⟧|\n)", output)[:2]
    assert yours.startswith("1")
    assert theirs.startswith("2")


def test_prompts_from_files_and_pipes(run: Run, stack: Stack, tmp_path: Any) -> None:
    cached(stack, TEXT)
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    expected = run("explain", TEXT)[1]
    assert "all but the last one\n" in expected
    assert run("explain", "-f", str(path))[1] == expected
    assert run("explain", typed=TEXT)[1] == expected
    whole = json.dumps({"prompt": TEXT, "model": "any", "stream": True, "temperature": 0.3})
    assert run("explain", typed=whole)[1] == expected
    assert "0 of" in run("explain", TEXT, "--salt=mine")[1]
    assert "all but the last one\n" not in run("explain", TEXT, "--chat")[1]


def test_pins_are_made_listed_and_ended(run: Run, stack: Stack) -> None:
    held = Pinned("system\nprompt", 3, 36, 3541.2)
    stack.manager.pins = lambda message: PinsAnswer(message.query_id, (held,), 3, 25)
    status, output, _ = run("pins")
    assert status == 0
    assert "system⏎prompt" in output
    assert "59 min" in output
    assert "3 of at most 25 blocks" in output
    stack.manager.pins = lambda message: PinsAnswer(message.query_id, (Pinned("a", 3, 36, 60.0),), 3, 25)
    assert run("pins", "--add=a", "--ttl=60", TEXT)[1] == "a holds 3 blocks, 36 tokens, for 60 s\n"
    assert stack.manager.pin_messages[-1].ttl == 60  # type: ignore[union-attr]
    assert run("pins", "--remove=a")[1] == "a is no longer pinned\n"
    stack.manager.pins = lambda message: PinsAnswer(message.query_id, (), 0, 25)
    assert run("pins")[1].startswith("nothing is pinned")


def test_events_go_on_after_the_last_one(run: Run, stack: Stack) -> None:
    cache = stack.manager.cache
    cached(stack, TEXT)
    cache.remove(1, "capacity", "cmpl-7")
    start = f"{cache.boot_id}:0"
    number = len(cache.events)
    status, output, _ = run("events", f"--after={start}", f"--count={number}")
    assert status == 0
    lines = output.splitlines()
    assert len(lines) == number
    assert "+ stored   block 0" in lines[0]
    assert "  Hello there! You are a helpful" in lines[0]
    assert "− removed  block 1 capacity for cmpl-7" in lines[-1]
    answers = [
        json.loads(line) for line in run("events", f"--after={start}", "--count=2", "--json")[1].splitlines()
    ]
    assert [answer["id"] for answer in answers] == [f"{cache.boot_id}:1", f"{cache.boot_id}:2"]
    cache.forget = 2
    assert "events after 1 are lost" in run("events", f"--after={cache.boot_id}:1", "--count=1")[1]


def test_what_the_server_refuses_is_not_asked_again(run: Run) -> None:
    for options in (["--after=x"], ["--after=a:1", "--key=unknown"]):
        status, output, errors = run("events", *options)
        assert (status, output, "trying again" in errors) == (1, "", False)


def test_a_stream_that_breaks_off_is_taken_up_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def events(self: KvApi, last_id: str, snapshot: bool) -> Iterator[Event]:
        asked.append(last_id)
        if len(asked) == 1:  # before anything happened
            raise Broken("the stream of events ended")
        if len(asked) == 3:
            raise ServerError("no answer")
        yield Event("removed", {"block": len(asked), "hash": "ab", "time": 0.0}, f"b:{len(asked)}")
        raise Broken("the stream of events ended")

    monkeypatch.setattr(KvApi, "events", events)
    monkeypatch.setattr(kv, "PAUSES", (0.0,))
    assert main(["events", "--count=2"]) == 0
    shown_lines = capsys.readouterr()
    assert asked == ["", "", "b:2", "b:2"]
    assert re.findall(r"block (\d)", shown_lines.out) == ["2", "4"]
    assert "trying again" in shown_lines.err


# --- top ----------------------------------------------------------------------------------------------------


def top_of(stack: Stack, key: str = "root") -> kv_top.Top:
    client = httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {key}"})
    ticks = iter(range(1000))
    return kv_top.Top(KvApi(client), lambda: float(next(ticks)))


def test_top_draws_until_q(stack: Stack) -> None:
    """It finds what is live behind many that have ended."""
    over = [request(f"over-{number}", "ended") for number in range(600)]
    stack.manager.cache.requests = [*over, request("cmpl-a"), *over, request("cmpl-b", "waiting")]
    output, keys = io.StringIO(), iter(["", "x", "q"])
    console = Console(file=output, force_terminal=True, width=120, height=40, color_system=None)
    assert kv_top.run(top_of(stack), console, 60.0, lambda seconds: next(keys)) == 0
    picture = output.getvalue()
    for words in ("cmpl-a", "cmpl-b", "runner-0 ready", "tokens/s", "q or Ctrl-C ends", "waste 25.0%"):
        assert words in picture
    assert "over-" not in picture
    assert next(keys, None) is None


def test_top_ends_at_ctrl_c(stack: Stack) -> None:
    def interrupted(seconds: float) -> str:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    assert kv_top.run(top_of(stack), console, 60.0, interrupted) == 0


def test_top_keeps_what_it_knows_while_the_server_is_gone(stack: Stack) -> None:
    top = top_of(stack)
    top.look()
    known = top.stats
    top._api = KvApi(httpx.Client(base_url="http://127.0.0.1:9"))
    top.look()
    assert top.stats is known
    console = Console(file=io.StringIO(), width=120)
    console.print(top.shown(40))
    assert "no answer from http://127.0.0.1:9" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ServerError):
        top.as_json()


def test_top_in_a_pipe_is_lines(run: Run) -> None:
    status, output, _ = run("top", "--count=2", "--interval=0.1")
    assert status == 0
    assert [line[:40] for line in output.splitlines()] == ["blocks: 30 in use, 9 cached, 60 free; hi"] * 2


def test_rates_are_taken_over_a_window() -> None:
    class Api(KvApi):
        turn = 0

        def get(self, path: str, **query: object) -> dict[str, Any]:
            self.turn += path == "/kv/stats"
            cache = {"queries": 100 * self.turn, "hits": 25 * self.turn}
            return {"boot_id": "a", "cache": cache, "requests": [], "next_cursor": None}

        def counters(self) -> dict[str, float]:
            return {kv_top.OUTPUT: 7.0 * self.turn}

    ticks = iter(range(100))
    top = kv_top.Top(Api(httpx.Client()), lambda: float(next(ticks)))
    for _ in range(30):
        top.look()
    assert (top.rates[-1], top.hits[-1], len(top.rates)) == (7.0, 0.25, 29)
    assert kv_top.spark([0.0, 1.0, 2.0, 4.0]) == "▁▃▅█"
    assert kv_top.spark([]) == ""


def test_top_in_a_real_terminal_ends_with_q(stack: Stack) -> None:
    environ = {**os.environ, "PAGEKEEPER_URL": stack.url, "PAGEKEEPER_KEY": "root", "TERM": "xterm"}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-m", "services.cli", "kv", "top"], environ)
    output = b""

    def drawn() -> bool:
        nonlocal output
        if select.select([terminal], [], [], 0)[0]:
            output += os.read(terminal, 65536)
        return b"Ctrl-C" in output

    wait_until(drawn, "the picture")
    os.write(terminal, b"q")
    ended: list[int] = []

    def done() -> bool:
        with contextlib.suppress(OSError):
            if select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 65536)
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(ended)

    wait_until(done, "the end of top")
    os.close(terminal)
    assert ended == [0]


# --- what goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", ""], "the text is empty"),
        (["explain", "-f", "/nowhere"], "/nowhere cannot be read"),
        (["explain", "a", "-f", "b"], "the text or a file"),
        (["pins", "--add=a", "--remove=b"], "two commands"),
        (["pins", "text"], "for --add NAME"),
    ],
)
def test_wrong_usage_is_told(run: Run, argv: list[str], message: str) -> None:
    status, output, errors = run(*argv)
    assert (status, output) == (2, "")
    assert message in errors


@pytest.mark.parametrize(
    "argv", [["top", "--interval=0"], ["tree", "--limit=no"], ["stats", "--url=ftp://a"], [], ["nothing"]]
)
def test_wrong_options_are_refused(run: Run, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    assert ended.value.code == 2
    assert "usage: pagekeeper kv" in capsys.readouterr().err


def test_what_the_server_refuses_is_told_in_its_words(run: Run) -> None:
    status, output, errors = run("stats", "--key=wrong")
    assert (status, output) == (1, "")
    assert "the server answered 401" in errors
    assert "give --key or PAGEKEEPER_KEY" in errors
    assert run("tree", f"--parent={'ab' * 32}")[2].startswith("pagekeeper kv tree: the server answered 404")


def test_no_server_and_no_pagekeeper(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    status, _, errors = run("stats", f"--url=http://127.0.0.1:{free}")
    assert status == 1
    assert "is `pagekeeper serve` running there?" in errors

    def page(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="<html>")

    api = KvApi(httpx.Client(transport=httpx.MockTransport(page), base_url="http://a"))
    with pytest.raises(ServerError, match="is this a Pagekeeper"):
        api.get("/kv/stats")
