"""Resumable streams over HTTP, with two frontends in one process, on files and on Redis."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from kvmanager.protocol import Rejected
from services.streams.redis_journal import key
from tests.services.fake_stack import Stack, says, wait_until
from tests.services.redis_server import RedisServer

TEXT = "Hi 👋🏽 there, 👩‍👩‍👧 and 🇫🇷! Ça va? 你好。"
BODY: dict[str, Any] = {
    "prompt": "Hello",
    "max_tokens": 100,
    "stream": True,
    "stream_options": {"resumable": True, "include_usage": True},
}

Event = tuple[int | None, str]


@pytest.fixture(scope="module", params=["files", "redis"])
def shared(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with RedisServer() as redis:
        url = redis.url if request.param == "redis" else ""
        with Stack(frontends=2, redis_url=url, api_keys="one,two") as stack:
            yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    shared.manager.script = says(TEXT, "Another one, which is longer than that.")
    shared.manager.cancels.clear()
    yield shared
    shared.manager.reject = lambda submit: None
    shared.manager.hold_at = None
    shared.go_on()


def parse(lines: Iterator[str]) -> Iterator[Event]:
    """(number, data) of each event."""
    number = None
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, line[6:]
            number = None


def keyed(key: str = "one", **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


def ask(stack: Stack, **fields: Any) -> httpx.Response:
    path = "chat/completions" if "messages" in fields else "completions"
    body = {**BODY, **fields}
    if "messages" in fields:
        del body["prompt"]
    return httpx.post(f"{stack.url}/v1/{path}", json=body, headers=keyed(), timeout=20)


def resume(
    url: str, stream_id: str, after: int | str | None = None, key: str = "one", method: str = "GET"
) -> httpx.Response:
    headers = keyed(key) if after is None else keyed(key, **{"last-event-id": str(after)})
    return httpx.request(method, f"{url}/v1/streams/{stream_id}", headers=headers, timeout=20)


def all_of(answer: httpx.Response) -> list[Event]:
    assert answer.status_code == 200, answer.text
    return list(parse(iter(answer.text.split("\n"))))


def first_of(stack: Stack, count: int, **fields: Any) -> tuple[str, list[Event]]:
    """Ask, take `count` events, go away. The stream's id, and the events."""
    taken: list[Event] = []
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json={**BODY, **fields}, headers=keyed(), timeout=20
    ) as answer:
        events = parse(answer.iter_lines())
        while len(taken) < count:
            taken.append(next(events))
        return answer.headers["x-stream-id"], taken


def text_of(events: list[Event], index: int = 0) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_events_are_numbered_and_the_id_is_told(stack: Stack) -> None:
    answer = ask(stack)
    events = all_of(answer)
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert events[-1][1] == "[DONE]"
    assert {json.loads(data)["id"] for _, data in events[:-1]} == {answer.headers["x-stream-id"]}
    assert text_of(events) == TEXT
    plain = ask(stack, stream_options={"include_usage": True})
    assert "x-stream-id" not in plain.headers
    assert all(number is None for number, _ in all_of(plain))


def test_the_openai_client_reads_it_as_any_other(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="one", max_retries=0, timeout=20)
    options: Any = {"resumable": True}
    chunks = client.completions.create(
        model=stack.model.name, prompt="Hello", max_tokens=100, stream=True, stream_options=options
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


@pytest.mark.parametrize("fields", [{"n": 2}, {"messages": [{"role": "user", "content": "Hi"}], "n": 2}])
def test_any_frontend_sends_what_is_after_any_event(stack: Stack, fields: dict[str, Any]) -> None:
    answer = ask(stack, **fields)
    events = all_of(answer)
    for after in range(len(events)):
        url = stack.urls[after % 2]
        assert all_of(resume(url, answer.headers["x-stream-id"], after)) == events[after:]
    assert all_of(resume(stack.urls[1], answer.headers["x-stream-id"])) == events
    ended = resume(stack.urls[1], answer.headers["x-stream-id"], len(events))
    assert (ended.status_code, ended.content) == (204, b"")


@pytest.mark.parametrize("at", [0, 1])
def test_it_goes_on_without_its_client_and_is_read_while_it_does(stack: Stack, at: int) -> None:
    stack.manager.hold_at = 5
    stream_id, taken = first_of(stack, 1)
    url = f"{stack.urls[at]}/v1/streams/{stream_id}"
    with httpx.stream("GET", url, headers=keyed(**{"last-event-id": "1"}), timeout=20) as answer:
        stack.manager.hold_at = None
        stack.go_on()
        taken += parse(answer.iter_lines())
    assert [number for number, _ in taken] == list(range(1, len(taken) + 1))
    assert text_of(taken) == TEXT
    assert stack.manager.cancels == []


def test_several_read_one_stream(stack: Stack) -> None:
    stack.manager.hold_at = 5
    stream_id, _ = first_of(stack, 1)
    streams = [
        httpx.Client(timeout=20).stream("GET", f"{url}/v1/streams/{stream_id}", headers=keyed())
        for url in (*stack.urls, *stack.urls)
    ]
    answers = [stream.__enter__() for stream in streams]
    stack.manager.hold_at = None
    stack.go_on()
    read = [list(parse(answer.iter_lines())) for answer in answers]
    for stream in streams:
        stream.__exit__(None, None, None)
    assert text_of(read[0]) == TEXT
    assert all(events == read[0] for events in read)


def test_it_belongs_to_the_key_that_made_it(stack: Stack) -> None:
    stream_id = ask(stack).headers["x-stream-id"]
    for url in stack.urls:
        refused = resume(url, stream_id, key="two")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "not_found"
        assert resume(url, stream_id, key="three").status_code == 401


@pytest.mark.parametrize("at", [0, 1])
def test_it_can_be_ended_on_any_frontend(stack: Stack, at: int) -> None:
    stack.manager.hold_at = 3
    stream_id, _ = first_of(stack, 1)
    url = f"{stack.urls[at]}/v1/streams/{stream_id}"
    assert httpx.delete(url, headers=keyed("two")).status_code == 404
    here, there = (
        httpx.stream("GET", f"{base}/v1/streams/{stream_id}", headers=keyed(), timeout=20)
        for base in stack.urls
    )
    with here as one, there as other:
        assert httpx.delete(url, headers=keyed()).json() == {"id": stream_id, "deleted": True}
        for reader in (one, other):
            *_, (number, error), done = parse(reader.iter_lines())
            assert (number, json.loads(error)["error"]["code"]) == (None, "not_found")
            assert done == (None, "[DONE]")
    wait_until(lambda: len(stack.manager.cancels) == 1, "the cancel")
    for method in ("GET", "DELETE"):
        assert resume(stack.urls[1 - at], stream_id, method=method).status_code == 404


@pytest.mark.parametrize("stream_id", ["cmpl-" + "0" * 32, "..%2f..%2fkv.bin", "x"])
def test_an_unknown_one_is_404(stack: Stack, stream_id: str) -> None:
    assert resume(stack.url, stream_id).status_code == 404


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "²", "9" * 20, "1000"])
def test_a_wrong_last_event_id_is_400(stack: Stack, after: str) -> None:
    refused = httpx.get(
        f"{stack.url}/v1/streams/{ask(stack).headers['x-stream-id']}",
        headers={b"authorization": b"Bearer one", b"last-event-id": after.encode()},
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Last-Event-ID"


def test_head_says_whether_it_is_there(stack: Stack) -> None:
    stream_id = ask(stack).headers["x-stream-id"]
    assert resume(stack.urls[1], stream_id, method="HEAD").status_code == 200
    assert resume(stack.urls[1], "cmpl-" + "0" * 32, method="HEAD").status_code == 404


def test_a_refusal_has_its_own_status_and_leaves_nothing(stack: Stack) -> None:
    stack.manager.reject = lambda submit: Rejected(submit.request_id, submit.attempt, "can_never_fit", "big")
    refused = ask(stack)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert list((Path(stack.pool_directory) / "streams").glob("*.lock")) == []


def test_an_error_on_the_way_is_an_event_that_is_kept(stack: Stack) -> None:
    stack.manager.hold_at = 3
    stream_id, taken = first_of(stack, 1)
    stack.manager.reject = lambda submit: Rejected(submit.request_id, submit.attempt, "internal", "broken")
    stack.do(stack.manager.lose_runner)
    for url in stack.urls:
        events = all_of(resume(url, stream_id, 1))
        assert [number for number, _ in events] == list(range(2, len(events) + 2))
        assert json.loads(events[-2][1])["error"]["message"] == "broken"
        assert events[-1][1] == "[DONE]"
        assert TEXT.startswith(text_of([*taken, *events[:-2]]))


def test_a_beam_search_comes_in_one_piece(stack: Stack) -> None:
    answer = ask(stack, use_beam_search=True, n=2, temperature=0)
    events = all_of(answer)
    assert text_of(events) == TEXT
    assert all_of(resume(stack.urls[1], answer.headers["x-stream-id"], 1)) == events[1:]


def test_it_is_only_for_streams(stack: Stack) -> None:
    refused = ask(stack, stream=False)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


# --- limits -------------------------------------------------------------------------------------------------


def test_what_is_not_kept_any_more_is_410() -> None:
    with Stack(stream_bytes=4096, api_keys="one") as stack:
        stack.manager.script = says(TEXT)
        stack.manager.hold_at = 1
        stream_id, _ = first_of(stack, 1, n=32)  # at least one event for each choice's end
        stack.manager.hold_at = None
        stack.go_on()
        first = all_of(resume(stack.url, stream_id))[0][0]
        assert first is not None
        assert first > 2
        gone = resume(stack.url, stream_id, first - 2)
        assert gone.status_code == 410
        assert gone.json()["error"]["code"] == "events_dropped"
        assert resume(stack.url, stream_id, first - 1).status_code == 200


def test_what_nobody_reads_ends_after_its_time_to_live() -> None:
    with Stack(stream_ttl_seconds=1.0, api_keys="one") as stack:
        stack.manager.script = says(TEXT)
        stack.manager.hold_at = 2
        stream_id, _ = first_of(stack, 1)
        wait_until(lambda: len(stack.manager.cancels) == 1, "the cancel")
        wait_until(lambda: resume(stack.url, stream_id).status_code == 404, "its end")
        assert list((Path(stack.pool_directory) / "streams").iterdir()) == []


def test_more_than_may_be_kept_are_refused() -> None:
    with Stack(max_streams=1, api_keys="one") as stack:
        stack.manager.script = says(TEXT)
        stack.manager.hold_at = 2
        stream_id, _ = first_of(stack, 1)
        refused = ask(stack)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        stack.manager.hold_at = None
        stack.go_on()
        assert all_of(resume(stack.url, stream_id))[-1][1] == "[DONE]"
        wait_until(lambda: ask(stack).status_code == 200, "room")
        assert resume(stack.url, stream_id).status_code == 404


def test_a_frontend_whose_lease_another_has_reads_on_from_it() -> None:
    """It writes nothing more itself; here nobody goes on in its place, so it takes the stream over again."""
    with RedisServer() as redis, Stack(redis_url=redis.url, api_keys="one") as stack:
        stack.manager.script = says(TEXT)
        stack.manager.hold_at = 3
        with httpx.stream(
            "POST", f"{stack.url}/v1/completions", json=BODY, headers=keyed(), timeout=20
        ) as answer:
            lines = parse(answer.iter_lines())
            events = [next(lines)]
            owner = key(answer.headers["x-stream-id"], "owner")
            Redis.from_url(redis.url).set(owner, "another", px=200)
            stack.manager.hold_at = None
            stack.go_on()
            events += lines
        assert text_of(events) == TEXT
        assert [number for number, _ in events] == list(range(1, len(events) + 1))
        assert len(stack.manager.submits) == 2
        assert "pagekeeper_taken_over_streams_total{" in httpx.get(f"{stack.url}/metrics").text


def test_a_redis_that_goes_away_costs_no_stream() -> None:
    with RedisServer() as redis, Stack(redis_url=redis.url, api_keys="one") as stack:
        stack.manager.script = says(TEXT)
        stack.manager.hold_at = 3
        with httpx.stream(
            "POST", f"{stack.url}/v1/completions", json=BODY, headers=keyed(), timeout=20
        ) as answer:
            lines = parse(answer.iter_lines())
            events = [next(lines)]
            redis.kill()
            stack.manager.hold_at = None
            stack.go_on()
            events += lines
        assert text_of(events) == TEXT
        numbers = [number for number, _ in events]
        assert numbers[0] == 1
        assert numbers[-1] is None
        refused = ask(stack)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "journal_unavailable")
        assert "Retry-After" in refused.headers
