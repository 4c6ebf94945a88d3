"""The files of /kv/ui as they are served: to whom, with which headers, and that they keep to themselves."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.kv.page import FOLDER
from tests.services.fake_stack import Stack

FILES = sorted(path.name for path in FOLDER.iterdir())
PAGE = (FOLDER / "index.html").read_text()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(admin_keys="root") as stack:
        yield stack


def get(stack: Stack, path: str = "", **headers: str) -> httpx.Response:
    return httpx.get(f"{stack.url}/kv/ui{path}", headers=headers, timeout=20)


def test_the_page_comes_without_a_key_and_its_figures_do_not(stack: Stack) -> None:
    page = get(stack)
    assert (page.status_code, page.text) == (200, PAGE)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert httpx.get(f"{stack.url}/kv/stats", timeout=20).status_code == 401


def test_only_this_server_may_be_asked_and_no_text_becomes_markup(stack: Stack) -> None:
    headers = get(stack).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_served_and_need_not_be_sent_twice(stack: Stack, name: str) -> None:
    first = get(stack, f"/{name}")
    assert (first.status_code, first.content) == (200, (FOLDER / name).read_bytes())
    assert first.headers["cache-control"] == "no-cache"
    again = get(stack, f"/{name}", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert get(stack, f"/{name}", **{"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/nothing.js", "/..%2fapp.py", "/%2e%2e/app.py", "/"])
def test_nothing_else_is_served(stack: Stack, path: str) -> None:
    assert get(stack, path).status_code in (307, 404)


def test_where_the_cache_is_shown_to_nobody_there_is_no_page() -> None:
    with Stack(host="0.0.0.0") as stack:
        answer = get(stack)
        assert answer.status_code == 403
        assert "set admin_keys" in answer.json()["error"]["message"]


def words(pattern: str, text: str) -> set[Any]:
    return set(re.findall(pattern, text))


def test_what_the_page_names_is_there() -> None:
    assert words(r'(?:href|src)="ui/([^"]+)"', PAGE) <= set(FILES)
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert words(r'from "\./([^"]+)"', text) <= set(FILES)
        assert words(r"https?://(?!www\.w3\.org/2000/svg)", text) == set()
        assert words(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) == set()
        assert max(map(len, text.splitlines())) <= 110
        assert len(text.splitlines()) <= 400
