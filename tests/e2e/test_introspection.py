"""The cache can be asked, on the served model: what is explained is what a request then finds, and what is
commanded is done.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, wait_until
from tests.e2e.test_cache import cached, tokens

BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4  # of the packaged model in float32
SYSTEM = "You are the night porter of a small hotel by the sea, and you know every guest by name. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(pool_bytes=64 * BLOCK_BYTES, keep_alive_seconds=0.5) as server:
        yield server


@pytest.fixture
def follower(server: Server) -> Iterator["Follower"]:
    """Whatever a test does, one who follows the events ends with what one who comes later finds."""
    with Follower(server) as follower:
        yield follower
        late = Follower(server)
        with late:
            wait_until(lambda: follower.held == late.held, "both to know the same")


class Follower:
    """A client of /kv/events in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self.held: set[str] | None = None
        self.names: list[str] = []
        self._found: set[str] = set()
        self._url = f"{server.url}/kv/events"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Follower":
        self._thread.start()
        wait_until(lambda: self.held is not None, "the snapshot")
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with httpx.stream("GET", self._url, timeout=60) as answer:
            name = ""
            for line in answer.iter_lines():
                if self._stop.is_set():
                    return
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    self._take(name, json.loads(line[6:]))

    def _take(self, name: str, data: Any) -> None:
        self.names.append(name)
        if name == "snapshot":
            self._found |= {block["hash"] for block in data["blocks"]}
            if not data["last"]:
                return
        elif name == "stored":
            self._found.add(data["hash"])
        elif name == "removed":
            self._found.discard(data["hash"])
        elif name == "cleared":
            self._found.clear()
        self.held = {*self._found}


def post(server: Server, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/kv/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(server: Server, path: str, **params: Any) -> Any:
    answer = httpx.get(f"{server.url}/kv/{path}", params=params, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_explain_says_what_a_request_then_finds(server: Server, follower: Follower) -> None:
    shared = tokens(1, 70)
    for prompt in (shared, shared, shared[:40] + tokens(2, 40), shared[:16], shared[:5], tokens(3, 50)):
        explained = post(server, "explain", prompt=prompt)
        planned = post(server, "plan", prompt=prompt, max_tokens=1)
        assert (planned["outcome"], planned["cached_tokens"]) == ("start", explained["cached_tokens"])
        assert cached(server.complete(prompt, max_tokens=1)) == explained["cached_tokens"]
        again = post(server, "explain", prompt=prompt)
        assert (again["reason"], again["cached_tokens"]) == ("hit", len(prompt) - 1)


def test_a_time_stamp_in_the_system_prompt_is_found(server: Server, follower: Follower) -> None:
    def messages(minute: int) -> list[dict[str, str]]:
        system = f"{SYSTEM} It is 23:{minute}. {SYSTEM}"
        return [{"role": "system", "content": system}, {"role": "user", "content": "Good evening"}]

    body = {"model": server.model, "messages": messages(41), "max_tokens": 1}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    explained = post(server, "explain", messages=messages(42))
    difference = explained["difference"]
    assert (difference["yours"]["text"][:1], difference["cached"]["text"][:1]) == ("2", "1")
    assert "in the system prompt, yours has '23:42', the cached text '23:41'" in explained["advice"]
    assert "probably a time of day" in explained["advice"]

    def found() -> bool:
        """A tree that is two seconds old may be shown again."""
        return any(node["match"] for node in get(server, "prefixes", q="it is 23:41")["nodes"])

    wait_until(found, "the time stamp in the tree")


def test_a_warm_prompt_is_a_hit_and_an_evicted_one_a_miss(server: Server, follower: Follower) -> None:
    prompt = tokens(4, 50)
    warm = post(server, "warm", prompt=prompt)
    assert (warm["tokens"], warm["cached_tokens"], warm["computed_tokens"]) == (50, 0, 50)
    assert cached(server.complete(prompt, max_tokens=1)) == 49
    assert post(server, "evict", prompt=prompt[:16])["evicted"] >= 4
    explained = post(server, "explain", prompt=prompt)
    assert (explained["reason"], explained["eviction"]["cause"]) == ("evicted", "evict")
    assert cached(server.complete(prompt, max_tokens=1)) == 0
    events = []
    with httpx.stream(
        "POST", f"{server.url}/kv/warm", json={"prompt": tokens(5, 300), "stream": True}, timeout=60
    ) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1]["tokens"] == 300
    counts = [event["computed_tokens"] for event in events]
    assert counts == sorted(counts)


def test_a_pin_survives_an_eviction_of_everything(server: Server, follower: Follower) -> None:
    prompt = tokens(6, 36)
    post(server, "warm", prompt=prompt)
    post(server, "pins", name="night", prompt=prompt, ttl=600)
    assert post(server, "evict", all=True)["in_use"] >= 3
    assert cached(server.complete(prompt, max_tokens=1)) == 35
    refused = post(server, "clear", 409)
    assert [blocker["kind"] for blocker in refused["blockers"]] == ["pin"]
    httpx.delete(f"{server.url}/kv/pins", params={"name": "night"}, timeout=20).raise_for_status()
    assert get(server, "pins")["data"] == []


def test_clear_is_refused_under_a_stream_and_forced_without_changing_it(
    server: Server, follower: Follower
) -> None:
    prompt = tokens(7, 60)
    fields = {"max_tokens": 64, "ignore_eos": True}
    text = server.text(prompt, **fields)
    body = {"model": server.model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines))
        refused = post(server, "clear", 409)
        assert refused["blockers"][0]["name"].startswith(first["id"])
        shown = get(server, f"requests/{first['id']}")["request"]
        assert (shown["state"], shown["num_prompt_tokens"]) == ("running", 60)
        assert len(shown["sequences"][0]["block_table"]) >= 4
        post(server, "clear", force=True)
        assert post(server, "explain", prompt=prompt)["cached_tokens"] == 0
        chunks = [first, *map(json.loads, lines)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert get(server, "audit")["ok"] is True
    assert get(server, "stats")["pool"]["num_blocks"] == 64
    assert "cleared" in follower.names or "removed" in follower.names


def test_tenants_with_keys_see_and_command_their_own() -> None:
    """With a server of its own: on the others everybody is an admin."""
    keys = {"admin_keys": "root", "tenant_keys": "one,two"}
    with Server(pool_bytes=64 * BLOCK_BYTES, **keys) as server:

        def call(key: str, path: str, **body: Any) -> httpx.Response:
            url, headers = f"{server.url}/{path}", {"authorization": f"Bearer {key}"}
            if body:
                return httpx.post(url, json=body, headers=headers, timeout=60)
            return httpx.get(url, headers=headers, timeout=60)

        prompt = tokens(8, 40)
        before = call("two", "kv/map").json()
        model = call("root", "v1/models").json()["data"][0]["id"]
        done = call("one", "v1/completions", model=model, prompt=prompt, max_tokens=1)
        assert done.status_code == 200, done.text
        assert call("two", "kv/map").json() == before
        found = {key: call(key, "kv/explain", prompt=prompt).json() for key in ("one", "two", "root")}
        assert [found[key]["cached_tokens"] for key in ("one", "two", "root")] == [39, 0, 0]
        assert found["two"]["sequence"] == 0 < found["root"]["sequence"]
        assert call("two", "kv/evict", prompt=prompt).json()["evicted"] == 0
        assert call("two", "kv/evict", all=True).json()["evicted"] == 0
        block = found["one"]["blocks"][0]["block"]
        assert [call(key, f"kv/blocks/{block}").status_code for key in ("one", "two")] == [200, 404]
        assert [call(key, "kv/prefixes").json()["total"] for key in ("one", "two")] == [1, 0]
        assert call("root", "kv/prefixes").json()["total"] == 1
        assert call("one", "kv/pins", name="kept", prompt=prompt).status_code == 200
        owner = call("root", "kv/pins").json()["data"][0]["tenant"]
        for key, status in (("two", 404), ("root", 200)):
            params = {"name": "kept", **({"tenant": owner} if key == "root" else {})}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.delete(f"{server.url}/kv/pins", params=params, headers=headers, timeout=20)
            assert answer.status_code == status
        assert [call(key, "metrics").status_code for key in ("root", "two")] == [200, 403]
        assert call("one", "kv/evict", all=True).json()["evicted"] >= 3
