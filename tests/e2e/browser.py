"""Headless Chromium for tests, through the DevTools protocol: a page that notes what it must not do."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")  # containers have neither


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; an AssertionError says how to get it."""
    found = [path for path in map(shutil.which, PROGRAMS) if path]
    assert found, "Chromium is missing; on Debian and Ubuntu: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page and what happened to it. `faults`: errors on its console, exceptions, requests to others. Not
    among them are console errors that contain one of `expected`.
    """

    def __init__(self, page: Page, url: str, expected: tuple[str, ...] = ()) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self._expected = expected
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self._asked(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self._expected):
            self.faults.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith(self.url + "/"):
            self.faults.append(f"request to {url}")

    def data(self, selector: str) -> dict[str, str]:
        """The data-… attributes of an element."""
        found: dict[str, str] = self.page.eval_on_selector(selector, "node => ({...node.dataset})")
        return found

    def wait(self, script: str, argument: Any = None) -> None:
        """Until a function of the page gives true; polled at every frame."""
        self.page.wait_for_function(script, arg=argument, timeout=20_000)


@contextlib.contextmanager
def visit(browser: Browser, url: str, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Visit]:
    """`/kv/ui` of a server, opened; afterwards it must be without faults. `options` are of a new context."""
    context = browser.new_context(**options)
    try:
        visit = Visit(context.new_page(), url, expected)
        visit.page.goto(f"{url}/kv/ui")
        yield visit
        assert visit.faults == [], visit.faults
    finally:
        context.close()
