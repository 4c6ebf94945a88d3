"""`pagekeeper kv top`: the pool, the runners and the requests, live."""

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.terminal.kv_client import Json, KvApi
from services.terminal.kv_views import (
    amount,
    facts,
    percent,
    pool_bar,
    pool_legend,
    request_counts,
    requests,
    runners,
)
from services.terminal.server_errors import ServerError

WINDOW: Final = 10.0  # seconds over which rates are taken
KEPT: Final = 60  # points of a line
LEVELS: Final = "▁▂▃▄▅▆▇█"
LINES_ABOVE: Final = 14  # that the figures take; the rest is for requests
OUTPUT: Final = "vllm:generation_tokens_total"

Sample = tuple[float, float, float, float]  # when, tokens looked up, tokens found, output tokens


class Top:
    """What is shown, from one look to the next."""

    def __init__(self, api: KvApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._samples: deque[Sample] = deque()
        self._boot = ""
        self.rates: deque[float] = deque(maxlen=KEPT)
        self.hits: deque[float] = deque(maxlen=KEPT)
        self.stats: Json | None = None
        self.requests: list[Json] = []
        self.error = ""

    def look(self) -> None:
        """Ask the server. What was known stays while it does not answer; `error` then says why."""
        try:
            self.stats = self._api.get("/kv/stats")
            self.requests = self._api.live_requests()
            output = self._api.counters().get(OUTPUT, 0.0)
        except ServerError as error:
            self.error = str(error)
            return
        self.error = ""
        if self.stats["boot_id"] != self._boot:
            self._boot = self.stats["boot_id"]
            self._samples.clear()
        cache = self.stats.get("cache") or {"queries": 0, "hits": 0}
        self._samples.append((self._clock(), cache["queries"], cache["hits"], output))
        while len(self._samples) > 2 and self._samples[1][0] < self._samples[-1][0] - WINDOW:
            self._samples.popleft()
        self._measure()

    def _measure(self) -> None:
        first, last = self._samples[0], self._samples[-1]
        seconds, looked_up, found, output = (
            after - before for before, after in zip(first, last, strict=True)
        )
        if seconds > 0:
            self.rates.append(max(0.0, output) / seconds)
        if looked_up > 0:
            self.hits.append(found / looked_up)

    def shown(self, height: int) -> RenderableType:
        """The whole picture, of at most `height` lines."""
        if self.stats is None:
            return Text(self.error or "asking…", "red" if self.error else "")
        pool = self.stats["pool"]
        used = (pool["reserved"] + pool["sealed"]) / max(1, pool["num_blocks"])
        rows: list[tuple[str, RenderableType]] = [
            ("pool", Group(pool_bar(pool), pool_legend(pool))),
            ("in use", f"{percent(used)}, waste {percent(pool['waste'])}"),
            ("hit rate", with_line(percent(self.hits[-1] if self.hits else None), self.hits, 1.0)),
            ("output", with_line(f"{speed(self.rates)} tokens/s", self.rates, None)),
            ("requests", request_counts(self.stats["requests"])),
            ("runners", runners(self.stats.get("runners", []))),
        ]
        note = Text(self.error, "red") if self.error else Text("q or Ctrl-C ends", "bright_black")
        room = max(1, height - LINES_ABOVE - len(self.stats.get("runners", [])))
        return Group(facts(rows), Text(), requests(self.requests, room), Text(), note)

    def as_json(self) -> Json:
        """One line for a script. Raises ServerError where there is nothing to say."""
        if self.error or self.stats is None:
            raise ServerError(self.error)
        rate = round(self.rates[-1], 1) if self.rates else None
        return {"stats": self.stats, "requests": self.requests, "output_tokens_per_second": rate}


def speed(rates: deque[float]) -> str:
    """The last one; after one look there is none."""
    return f"{rates[-1]:.1f}" if rates else "–"


def with_line(text: str, values: deque[float], top: float | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=16)
    table.add_row(text, Text(spark(list(values), top), "cyan"))
    return table


def spark(values: list[float], top: float | None = None) -> str:
    """Values as a line of small bars; `top` is the highest bar (none: the highest value)."""
    highest = top or max(values, default=0.0) or 1.0
    steps = len(LEVELS) - 1
    return "".join(LEVELS[min(steps, round(steps * value / highest))] for value in values)


def run(top: Top, console: Console, interval: float, key: Callable[[float], str]) -> int:
    """Show it until `key` (which waits at most so many seconds) gives a q, or Ctrl-C comes."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            top.look()
            live.update(top.shown(console.height), refresh=True)
            end = time.monotonic() + interval
            while (left := end - time.monotonic()) > 0:
                if key(left) in ("q", "Q"):
                    return 0
    return 0


def only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """The keys of the terminal, one by one, unechoed; without a terminal only the time passes."""
    if not sys.stdin.isatty():
        yield only_wait
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([number], [], [], seconds)
        return os.read(number, 1).decode("latin-1") if ready else ""

    try:
        tty.setcbreak(number)
        yield key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def figures(top: Top) -> str:
    """One line of text, for an output that is no terminal."""
    assert top.stats is not None
    pool, requests_ = top.stats["pool"], top.stats["requests"]
    used = pool["reserved"] + pool["sealed"]
    return (
        f"blocks: {amount(used)} in use, {amount(pool['cached'])} cached, {amount(pool['free'])} free; "
        f"hit rate {percent(top.hits[-1] if top.hits else None)}; "
        f"{speed(top.rates)} tokens/s; {request_counts(requests_)}"
    )
