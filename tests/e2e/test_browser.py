"""/kv/ui in headless Chromium: before a real server under load, and before made-up caches of other sizes."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from kvmanager.protocol import own_number
from services.auth import tenant_of
from tests.e2e.browser import Visit, chromium, visit
from tests.e2e.server import Server
from tests.services.fake_cache import BLOCK_SIZE, FakeCache
from tests.services.fake_stack import Stack, served_model

WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 390, "height": 844}
MAP = ".map-scroll canvas"
LETTER = "You are the gardener of a small park by the lake, and you answer every letter that visitors write. "
ASKED = LETTER + "It is 10:41 in the morning. When do the roses bloom?"
PASTED = LETTER + "It is 10:42 in the morning. When do the roses bloom?"
REFUSED = ("401",)  # the first question comes without a key
NASTY = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>\u202e turned"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(admin_keys="root", tenant_keys="acme") as stack:
        yield stack


class Load:
    """Requests without a pause, for as long as the context lasts."""

    def __init__(self, server: Server, streams: int = 2) -> None:
        self._server, self._streams = server, streams
        self._ended = threading.Event()

    def _work(self, number: int) -> None:
        while not self._ended.is_set():
            self._server.complete(f"{LETTER}Letter {number}: ", max_tokens=60, ignore_eos=True)

    def __enter__(self) -> None:
        self._pool = ThreadPoolExecutor(self._streams)
        self._works = [self._pool.submit(self._work, number) for number in range(self._streams)]

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for done in self._works:
            done.result(120)
        self._pool.shutdown()


def kv(server: Server, path: str) -> Any:
    answer = httpx.get(f"{server.url}/kv/{path}", timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()


def live(shown: Visit) -> None:
    shown.wait("() => document.body.dataset.connection === 'live'")


def has_blocks(shown: Visit, number: int) -> None:
    shown.wait("([map, n]) => document.querySelector(map).dataset.blocks === String(n)", [MAP, number])


def cell(shown: Visit, block: int) -> tuple[float, float]:
    """The middle of a block's cell, from the corner of the map."""
    data = shown.data(MAP)
    pitch, columns = float(data["pitch"]), int(data["columns"])
    return (block % columns + 0.45) * pitch, (block // columns + 0.45) * pitch


# --- a real server under load -------------------------------------------------------------------------------


def test_a_server_under_load_is_shown_as_it_is(served: Server, browser: Browser) -> None:
    served.complete(ASKED, max_tokens=8)
    total = kv(served, "stats")["pool"]["num_blocks"]
    with visit(browser, served.url, viewport=WIDE) as shown:
        with Load(served):
            live(shown)
            has_blocks(shown, total)
            shown.page.wait_for_selector(".request[data-state=running]")
            requests_light_up_their_blocks(shown)
            shown.page.wait_for_selector(".event.stored")
            shown.page.wait_for_selector(".tree-row")
        figures_agree(shown, served)
        a_block_tells_its_text(shown, served)
        the_tree_opens_and_is_searched(shown)
        where_a_prompt_diverges(shown, served)


def requests_light_up_their_blocks(shown: Visit) -> None:
    """The newest one's table opens; that of the next one if it has ended just then."""
    opened = "() => /^[0-9]+$/.test(document.querySelector('.request .chip')?.textContent ?? '')"
    for _ in range(10):
        shown.page.locator(".request[data-state=running] .request-head").last.click()
        with contextlib.suppress(PlaywrightTimeout):
            shown.page.wait_for_function(opened, timeout=2000)
            return
    raise AssertionError("no request showed its block table")


def figures_agree(shown: Visit, served: Server) -> None:
    """After the load: the map's counts, the tiles and the API's say the same."""
    shown.wait("() => document.querySelectorAll('.request').length === 0")
    pool = kv(served, "stats")["pool"]
    kinds = {"free": pool["free"], "cached": pool["cached"], "in use": pool["sealed"]}
    kinds |= {"being written": pool["reserved"], "quarantined": pool["quarantined"]}
    shown.wait(
        """kinds => [...document.querySelectorAll('#legend button')].every(
             button => kinds[button.innerText.split(/ \\d/)[0]] === undefined
               || kinds[button.innerText.split(/ \\d/)[0]] === Number(button.dataset.count))""",
        kinds,
    )
    counted = shown.page.eval_on_selector_all(
        "#legend button", "all => all.map(b => Number(b.dataset.count))"
    )
    assert sum(counted) == pool["num_blocks"]
    shown.wait(
        "note => document.getElementById('pool-note').textContent === note",
        f"{pool['reserved'] + pool['sealed']} of {pool['num_blocks']:,} · {pool['cached']:,} cached",
    )


def a_block_tells_its_text(shown: Visit, served: Server) -> None:
    pages = kv(served, "map?limit=8192")
    block = next(number for number, state in enumerate(pages["states"]) if state == "C")
    text = kv(served, f"blocks/{block}")["text"]
    x, y = cell(shown, block)
    shown.page.hover(MAP, position={"x": x, "y": y})
    shown.wait("text => document.querySelector('.tip-text').textContent === text", text)
    assert shown.page.inner_text(".tip-title") == f"Block {block}"
    shown.page.mouse.move(0, 0)
    shown.page.wait_for_selector(".tooltip", state="hidden")


def the_tree_opens_and_is_searched(shown: Visit) -> None:
    root = shown.page.locator(".tree-row[aria-expanded=false]").first
    root.click()
    shown.page.wait_for_selector(".tree-row[aria-level='2']")
    shown.page.fill(".tree-card input", "GARDENER")
    shown.page.wait_for_selector(".tree-row mark")
    assert shown.page.inner_text(".tree-row mark").lower() == "gardener"
    shown.page.fill(".tree-card input", "nowhere to be found")
    shown.page.wait_for_selector(".tree-card .empty:not([hidden])")


def where_a_prompt_diverges(shown: Visit, served: Server) -> None:
    answer = httpx.post(f"{served.url}/kv/explain", json={"prompt": PASTED}, timeout=20).json()
    shown.page.fill("textarea", PASTED)
    shown.page.click(".explain-card button.primary")
    shown.page.wait_for_selector(".result[data-reason]")
    data = shown.data(".result")
    assert (data["reason"], int(data["cached"])) == (answer["reason"], answer["cached_tokens"])
    assert 0 < answer["cached_tokens"] < answer["num_tokens"]
    assert shown.page.inner_text(".result .advice") == answer["advice"]
    yours, theirs = (shown.page.text_content(f".side.{name} .differs") or "" for name in ("yours", "theirs"))
    assert (yours[0], theirs[0]) == ("2", "1")
    assert shown.page.locator(".strip .cell").count() == -(-answer["num_tokens"] // answer["block_size"])


def test_dark_and_narrow(served: Server, browser: Browser) -> None:
    phone = {"viewport": NARROW, "color_scheme": "dark", "device_scale_factor": 2, "has_touch": True}
    with visit(browser, served.url, **phone) as shown:
        live(shown)
        page = shown.page
        page.wait_for_selector("#map-note:not(:empty)")
        assert page.evaluate("() => document.documentElement.scrollWidth") == NARROW["width"]
        background = "() => getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(background)
        page.click("#theme")
        light = page.evaluate(background)
        assert sum(map(int, light[4:-1].split(","))) > 600 > 200 > sum(map(int, dark[4:-1].split(",")))
        page.reload()
        live(shown)
        assert page.evaluate(background) == light
        page.emulate_media(color_scheme="light")
        page.tap(MAP)
        page.wait_for_selector(".tooltip.pinned")
        page.click(".tip-close")
        page.wait_for_selector(".tooltip", state="hidden")


# --- made-up caches -----------------------------------------------------------------------------------------


def fill(stack: Stack, num_blocks: int) -> FakeCache:
    cache = FakeCache(num_blocks)
    cache.boot_id = stack.manager.cache.boot_id + "x"
    stack.manager.cache = cache
    return cache


def enter(shown: Visit, key: str) -> None:
    shown.page.fill("#key", key)
    shown.page.click("#key-dialog .primary")


def test_a_hundred_thousand_blocks_with_a_key(stack: Stack, browser: Browser) -> None:
    cache = fill(stack, 100_000)
    tokens = served_model().tokenizer.encode(NASTY * 2)
    held = cache.store(tokens)
    cache.store([5] * BLOCK_SIZE, tenant=tenant_of(b"acme"))
    with visit(browser, stack.url, REFUSED, viewport=WIDE) as shown:
        page = shown.page
        page.wait_for_selector("#key-dialog[open]")
        assert "admin's and tenant's keys" in page.inner_text("#key-reason")
        enter(shown, "\u201croot\u201d")  # no header can carry it: that is no server that does not answer
        shown.wait("() => document.getElementById('key-reason').textContent.includes('ASCII')")
        enter(shown, "wrong")
        shown.wait("() => document.getElementById('key-reason').textContent.includes('not one of this')")
        enter(shown, "root")
        has_blocks(shown, 100_000)
        assert page.evaluate("() => [sessionStorage.length, localStorage.length]") == [1, 0]
        shown.wait(
            "n => [...document.querySelectorAll('#legend button')][4].dataset.count == n", len(held) + 1
        )
        page.focus(MAP)
        page.keyboard.press("End")
        shown.wait("() => document.querySelector('.map-status').textContent.startsWith('Block 99999: free')")
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        first = served_model().tokenizer.decode(tokens[:BLOCK_SIZE]).replace("\u202e", "\ufffd")
        shown.wait("text => document.querySelector('.tip-text').textContent === text", first)
        page.wait_for_selector(".tree-row")
        assert page.evaluate(
            "() => [window.pwned, document.querySelectorAll('main img, main script').length]"
        ) == [
            None,
            0,
        ]
        column = "map => [...map.getContext('2d').getImageData(1, 0, 1, 100).data]"
        pixels = page.eval_on_selector(MAP, column)
        assert pixels[4:8] != pixels[-4:]  # one that is cached, and a free one far below


def test_a_tenant_sees_its_own_alone(stack: Stack, browser: Browser) -> None:
    cache = fill(stack, 10)
    cache.store([6] * 3 * BLOCK_SIZE)
    (own,) = cache.store([5] * BLOCK_SIZE, tenant=tenant_of(b"acme"))
    held = cache.blocks[own]
    assert held is not None
    with visit(browser, stack.url, REFUSED, viewport=WIDE) as shown:
        enter(shown, "acme")
        has_blocks(shown, 1)
        x, y = cell(shown, 0)
        shown.page.click(MAP, position={"x": x, "y": y})
        shown.wait(
            "text => document.querySelector('.tip-title').textContent === text",
            f"Block {own_number(held.hash)}",
        )
        shown.page.wait_for_selector(".tip-text:not(:empty)")
        assert shown.page.inner_text("#hits-note") == "for admin keys"
        assert not shown.page.is_visible("#runners")  # what is not told is not "no runner"
        shown.page.click("#forget-key")
        shown.page.wait_for_selector("#key-dialog[open]")


def test_an_empty_pool_and_a_server_that_goes_and_comes_back(stack: Stack, browser: Browser) -> None:
    fill(stack, 0)
    with visit(browser, stack.url, (*REFUSED, "Failed to load"), viewport=WIDE) as shown:
        enter(shown, "root")
        live(shown)
        shown.page.wait_for_selector("#map-empty:not([hidden])")
        shown.page.context.set_offline(True)
        shown.page.wait_for_selector("#banner:not([hidden])")
        shown.wait(
            "() => /does not answer.*again in \\d+ s/.test(document.getElementById('banner').textContent)"
        )
        fill(stack, 30)
        shown.page.context.set_offline(False)
        shown.page.click("#retry")
        live(shown)
        shown.page.wait_for_selector("#banner", state="hidden")
        has_blocks(shown, 30)


@pytest.mark.parametrize(
    ("text", "kind", "body"),
    [
        ("Hello", "auto", {"prompt": "Hello"}),
        ("Hello", "chat", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("[1, 2]", "auto", {"prompt": [1, 2]}),
        ("[1, 2]", "text", {"prompt": "[1, 2]"}),
        ("{no json", "auto", {"prompt": "{no json"}),
        (
            '{"messages": [{"role": "user"}], "n": 3, "cache_salt": "s"}',
            "auto",
            {"messages": [{"role": "user"}], "cache_salt": "s"},
        ),
    ],
)
def test_what_is_pasted_is_understood(
    stack: Stack, browser: Browser, text: str, kind: str, body: Any
) -> None:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{stack.url}/kv/ui/icon.svg")
        script = "async ([text, kind]) => (await import('/kv/ui/explain.js')).bodyOf(text, kind).body"
        assert page.evaluate(script, [text, kind]) == json.loads(json.dumps(body))
    finally:
        context.close()
