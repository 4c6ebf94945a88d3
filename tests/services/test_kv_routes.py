"""The routes under /kv/ over real HTTP, with a fake manager that has a naive cache."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmanager.protocol import Evict, HolderInfo, PlanQuery, RunnerStats
from services.auth import tenant_of
from services.kv.state import runner_card, write_cursor
from tests.services.fake_cache import BLOCK_BYTES, FakeCache, request
from tests.services.fake_stack import Stack, says, served_model

TEXT = "You are a helpful assistant of the library. It is 10:41 now, and the doors close at nine. " * 2
GETS = (
    "stats",
    "map",
    "blocks/0",
    "prefixes",
    "requests",
    "requests/a",
    "holders",
    "audit",
    "events",
    "pins",
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(admin_keys="root", tenant_keys="acme,hooli,initech", api_keys="user") as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """With a cache of its own; what an earlier test's frontend has read of another is not used again."""
    boot = shared.manager.cache.boot_id
    shared.manager.cache = FakeCache()
    shared.manager.cache.boot_id = boot + "x"
    return shared


def ask(stack: Stack, path: str, key: str = "root", status: int = 200, **params: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{stack.url}/kv/{path}", params=params, headers=headers, timeout=20)
    assert answer.status_code == status, answer.text
    return answer.json()


def post(stack: Stack, path: str, body: dict[str, Any], key: str = "root", status: int = 200) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{stack.url}/kv/{path}", json=body, headers=headers, timeout=20)
    assert answer.status_code == status, answer.text
    return answer.json()


def tokens(text: str) -> list[int]:
    return served_model().tokenizer.encode(text)


def test_stats_for_an_admin_and_for_a_tenant(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.requests = [
        request("a"),
        request("b", "waiting"),
        request("c", "ended"),
        request("d", "preempting"),
    ]
    answer = ask(stack, "stats")
    assert answer["boot_id"] == cache.boot_id
    assert answer["pool"] == {
        "num_blocks": 100,
        "block_size": 16,
        "block_bytes": BLOCK_BYTES,
        "free": 60,
        "reserved": 10,
        "sealed": 20,
        "cached": 9,
        "quarantined": 1,
        "used_tokens": 360,
        "waste": 0.25,
    }
    assert answer["cache"]["hit_rate"] == 0.4
    assert answer["pins"] == {"blocks": 0, "budget_blocks": 25}
    (runner,) = answer["runners"]
    assert (runner["name"], runner["stuck"]) == ("runner-0", False)
    silent = RunnerStats("runner-1", 3, True, False, 1, 2, last_report_age=11.0)
    assert [runner_card(silent, seconds).stuck for seconds in (10.0, 12.0)] == [True, False]
    cache.store([2] * 40, tenant=tenant_of(b"hooli"))
    own = ask(stack, "stats", "hooli")
    assert own["requests"] == {"running": 2, "waiting": 1}
    assert set(own) == {"boot_id", "sequence", "pool", "requests", "pins"}
    assert (own["pool"]["used_tokens"], own["pool"]["free"], own["pool"]["cached"]) == (None, None, 3)


def test_the_map_in_pages(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    cache.store([2] * 16, tenant=tenant_of(b"initech"))
    cache.change(0, age=12.7, ref_count=3)
    cache.page = 30
    answer = ask(stack, "map")
    assert answer["states"] == "C" * 4 + "F" * 96
    assert (answer["first"], answer["next"], answer["num_blocks"]) == (0, None, 100)
    assert (answer["ref_counts"][:2], answer["ages"][:2], answer["num_tokens"][:4]) == (
        [3, 0],
        [12, 1.0],
        [16, 16, 8, 16],
    )
    assert answer["flags"][:4] == [0, 0, 4, 0]
    part = ask(stack, "map", first=2, limit=70)
    assert (part["states"], part["next"]) == ("CC" + "F" * 68, 72)
    own = ask(stack, "map", "initech")
    assert (own["states"], own["num_tokens"], own["num_blocks"]) == ("C", [16], 1)
    (number,) = own["blocks"]
    assert ask(stack, f"blocks/{number}", "initech")["block"] == number
    assert ask(stack, f"blocks/{number + 1}", "initech", 404)["error"]["code"] == "not_found"
    assert ask(stack, "map", first=200)["states"] == ""


def test_a_block_with_its_text(stack: Stack) -> None:
    cache = stack.manager.cache
    first, second, *_ = cache.store(tokens(TEXT))
    answer = ask(stack, f"blocks/{second}")
    assert answer["text"] == served_model().tokenizer.decode(tokens(TEXT)[16:32])
    assert (answer["parent_block"], answer["num_tokens"], answer["state"]) == (first, 16, "CACHED")
    assert (answer["eviction_rank"], answer["first_token"]) == (None, 0)
    assert ask(stack, "blocks/100", status=404)["error"]["param"] == "id"
    assert ask(stack, f"blocks/{first}", "hooli", 404)["error"]["code"] == "not_found"
    for wrong in ("x", "-1", "99999999999", "1.5"):
        assert ask(stack, f"blocks/{wrong}", status=400)["error"]["param"] == "id"


def test_the_tree_with_text(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store(tokens(TEXT))
    cache.store(tokens(TEXT.replace("nine", "ten")))
    cache.store(tokens("Another"), tenant=tenant_of(b"acme"))
    answer = ask(stack, "prefixes")
    assert answer["sequence"] == cache.at.sequence
    assert (answer["total"], answer["next_cursor"]) == (4, None)
    top = answer["nodes"][0]
    assert (top["depth"], top["parent"], top["children"], top["first_token"]) == (0, None, 2, 0)
    assert TEXT.startswith(top["text"])
    assert top["subtree"]["bytes"] == BLOCK_BYTES * top["subtree"]["blocks"]
    found = ask(stack, "prefixes", q="CLOSE AT TEN")
    assert [node["match"] for node in found["nodes"]] == [False, True]
    below = ask(stack, "prefixes", parent=top["hash"], limit=1)
    assert (below["total"], len(below["nodes"])) == (2, 1)
    rest = ask(stack, "prefixes", parent=top["hash"], limit=1, cursor=below["next_cursor"])
    assert rest["nodes"][0]["hash"] != below["nodes"][0]["hash"]
    assert ask(stack, "prefixes", depth=1)["total"] == 2
    own = ask(stack, "prefixes", "acme")
    assert ([node["text"] for node in own["nodes"]], own["total"]) == (["Another"], 1)
    assert own["nodes"][0]["salt"].startswith(tenant_of(b"acme"))
    assert ask(stack, "prefixes", status=404, parent="0" * 64)["error"]["param"] == "parent"


def test_requests_and_holders(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.requests = [request(f"cmpl-{n}-0", "running" if n % 3 else "waiting") for n in range(10)]
    cache.holders = [HolderInfo("sequence", "cmpl-1-0", "runner-0", 3, stuck=True)]
    answer = ask(stack, "requests", limit=4)
    assert [r["request_id"] for r in answer["requests"]] == [f"cmpl-{n}-0" for n in range(4)]
    rest = ask(stack, "requests", limit=10, cursor=answer["next_cursor"])
    assert (len(rest["requests"]), rest["next_cursor"]) == (6, None)
    waiting = ask(stack, "requests", state="waiting")
    assert [r["request_id"] for r in waiting["requests"]] == [f"cmpl-{n}-0" for n in (0, 3, 6, 9)]
    assert (
        ask(stack, "requests", state="waiting", limit=1, cursor=write_cursor(f"{(1.0).hex()} 0 x"))[
            "requests"
        ][0]["request_id"]
        == "cmpl-3-0"
    )
    for name in ("cmpl-4", "cmpl-4-0"):
        one = ask(stack, f"requests/{name}")["request"]
        assert (one["request_id"], one["sequences"][0]["block_table"][0]) == (
            "cmpl-4-0",
            {"block": 1, "generation": 1},
        )
    assert ask(stack, "requests/none", status=404)["error"]["param"] == "id"
    ask(stack, "requests/" + "x" * 500, status=404)
    held = ask(stack, "holders")
    assert held["holders"][0]["name"] == "cmpl-1-0"
    assert held["processes"][0]["seconds_silent"] == 12.5
    assert ask(stack, "holders", "acme")["processes"] == []


def test_the_audit_is_for_admins(stack: Stack) -> None:
    assert ask(stack, "audit")["checked"] == 100
    assert ask(stack, "audit")["ok"] is True
    stack.manager.cache.faults = ["block 3 has two owners"]
    assert ask(stack, "audit")["faults"] == ["block 3 has two owners"]
    assert ask(stack, "audit")["ok"] is False
    assert ask(stack, "audit", "acme", 403)["error"]["code"] == "forbidden"


def test_explain_says_where_a_prompt_leaves_the_cache(stack: Stack) -> None:
    stack.manager.cache.store(tokens(TEXT))
    changed = TEXT.replace("10:41", "10:42")
    answer = post(stack, "explain", {"prompt": changed})
    difference = answer["difference"]
    assert answer["cached_tokens"] == difference["token"]
    assert difference["yours"]["text"].startswith("2 now")
    assert difference["cached"]["text"].startswith("1 now")
    assert "yours has '10:42', the cached text '10:41', probably a time of day" in answer["advice"]
    assert sum(block["num_tokens"] for block in answer["blocks"]) == answer["cached_tokens"]
    assert post(stack, "explain", {"prompt": TEXT})["reason"] == "hit"
    salted = post(stack, "explain", {"prompt": TEXT, "cache_salt": "s"})
    assert salted["cached_tokens"] == 0
    assert "without a salt" in salted["advice"]
    stack.manager.cache.store(tokens(TEXT), "s", tenant_of(b"acme"))
    own = post(stack, "explain", {"prompt": TEXT}, "acme")
    assert own["cached_tokens"] == 0
    assert "its first 16 tokens are under another one" in own["advice"]
    assert post(stack, "explain", {"prompt": tokens(TEXT)})["num_tokens"] == len(tokens(TEXT))


def test_explain_knows_the_system_prompt(stack: Stack) -> None:
    def messages(name: str) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": f"You are {name}, who knows every book of the library by heart."},
            {"role": "user", "content": "Hello"},
        ]

    body = {"messages": messages("Anna")}
    shown = httpx.post(
        f"{stack.url}/tokenize", json=body, headers={"authorization": "Bearer root"}, timeout=20
    )
    stack.manager.cache.store(shown.json()["tokens"])
    assert (
        "differs: in the system prompt, yours has ' Bert'"
        in post(stack, "explain", {"messages": messages("Bert")})["advice"]
    )
    changed = [*messages("Anna")[:1], {"role": "user", "content": "Bye"}]
    assert "system prompt" not in post(stack, "explain", {"messages": changed})["advice"]


def test_plan_is_asked_as_a_completion_would_run(stack: Stack) -> None:
    body = {"prompt": "Hello", "n": 2, "priority": 3, "max_tokens": 7, "cache_salt": "s"}
    answer = post(stack, "plan", body, "acme")
    assert (answer["outcome"], answer["allocate"], answer["num_tokens"]) == ("start", 1, 1)
    query = stack.manager.cache.questions[-1]
    assert isinstance(query, PlanQuery)
    assert (query.max_tokens, query.num_choices, query.priority, query.tenant) == (
        7,
        2,
        3,
        tenant_of(b"acme"),
    )
    post(stack, "plan", {"prompt": "Hello"})
    post(stack, "plan", {"messages": [{"role": "user", "content": "Hi"}]})
    plain, chat = (q.max_tokens for q in stack.manager.cache.questions[-2:] if isinstance(q, PlanQuery))
    assert plain == 16
    assert chat > 1000


def test_warm_computes_a_prompt_and_says_what_it_cost(stack: Stack) -> None:
    stack.manager.script, stack.manager.cached_tokens = says(" a b"), 1
    stack.manager.submits.clear()
    answer = post(stack, "warm", {"prompt": "Hello there", "cache_salt": "s"}, "acme")
    assert (answer["tokens"], answer["cached_tokens"], answer["computed_tokens"]) == (2, 1, 1)
    assert answer["seconds"] >= 0
    (submit,) = stack.manager.submits
    assert (submit.sampling.max_tokens, submit.cache_salt, submit.tenant) == (1, "s", tenant_of(b"acme"))
    assert submit.request_id.startswith("warm-")


def test_warm_shows_its_progress(stack: Stack) -> None:
    stack.manager.script = says(" a")
    stack.hold()
    events = []
    url, headers = f"{stack.url}/kv/warm", {"authorization": "Bearer root"}
    try:
        body = {"prompt": "Hello " * 20, "stream": True}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    events.append([line[7:]])
                elif line.startswith("data: "):
                    events[-1].append(json.loads(line[6:]))
                    computed = events[-1][1].get("computed_tokens")
                    if events[-1][0] == "progress" and computed == 0:
                        name = stack.manager.submits[-1].request_id
                        stack.manager.cache.requests = [request(name, computed=12)]
                    elif events[-1][0] == "progress":
                        stack.go_on()
    finally:
        stack.go_on()
    total = len(tokens("Hello " * 20))
    assert events[:2] == [["progress", {"computed_tokens": n, "tokens": total}] for n in (0, 12)]
    assert (events[2][0], events[2][1]["tokens"]) == ("done", total)


def test_warm_is_refused_as_a_request_would_be(stack: Stack) -> None:
    from kvmanager.protocol import Rejected

    stack.manager.reject = lambda submit: Rejected(
        submit.request_id, submit.attempt, "can_never_fit", "too long"
    )
    try:
        for stream in (False, True):
            error = post(stack, "warm", {"prompt": "Hello", "stream": stream}, status=400)["error"]
            assert (error["code"], error["message"]) == ("context_length_exceeded", "too long")
    finally:
        stack.manager.reject = lambda submit: None


def test_evict_goes_on_until_all_is_done(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 16 * 10)
    cache.store([2] * 16, "s")
    assert post(stack, "evict", {"cache_salt": "s"}) == {
        "boot_id": cache.boot_id,
        "sequence": 12,
        "evicted": 1,
        "in_use": 0,
    }
    assert post(stack, "evict", {"all": True})["evicted"] == 10
    assert sum(isinstance(question, Evict) for question in cache.questions) == 4
    post(stack, "evict", {"prompt": "Hello"}, "acme")
    last = cache.questions[-1]
    assert isinstance(last, Evict)
    assert (list(last.token_ids), last.tenant) == (tokens("Hello"), tenant_of(b"acme"))


def test_clear_names_who_is_in_the_way_unless_it_is_forced(stack: Stack) -> None:
    cache = stack.manager.cache
    cache.store([1] * 40)
    cache.blockers = (HolderInfo("sequence", "cmpl-1-0", "runner-0", 2),)
    refused = post(stack, "clear", {}, status=409)
    assert (refused["error"]["code"], refused["in_use"], refused["blockers"][0]["name"]) == (
        "in_use",
        2,
        "cmpl-1-0",
    )
    assert post(stack, "clear", {"force": True})["evicted"] == 3


def test_plain_keys_see_nothing_and_everybody_else_something(stack: Stack) -> None:
    for path in GETS:
        answer = httpx.get(f"{stack.url}/kv/{path}", headers={"authorization": "Bearer user"}, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
    for path in ("explain", "plan", "warm", "evict", "clear", "pins"):
        post(stack, path, {"prompt": "Hello"}, "user", 403)


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("map", {"first": "x"}, "first"),
        ("map", {"limit": 8193}, "limit"),
        ("map", {"limit": 0}, "limit"),
        ("map", {"last": 3}, "last"),
        ("prefixes", {"sort": "size"}, "sort"),
        ("prefixes", {"order": "up"}, "order"),
        ("prefixes", {"depth": 0}, "depth"),
        ("prefixes", {"parent": "xyz"}, "parent"),
        ("prefixes", {"cursor": "xyz"}, "cursor"),
        ("prefixes", {"q": "x" * 201}, "q"),
        ("requests", {"state": "gone"}, "state"),
        ("requests", {"limit": "2049"}, "limit"),
        ("requests", {"cursor": "1" * 19}, "cursor"),
        ("requests", {"cursor": "x"}, "cursor"),
        ("pins", {"x": 1}, "x"),
        ("stats", {"x": 1}, "x"),
        ("map", {"limit": [3, 4]}, "limit"),
        ("events", {"snapshot": "yes"}, "snapshot"),
    ],
)
def test_wrong_parameters_are_named(stack: Stack, path: str, params: dict[str, Any], param: str) -> None:
    assert ask(stack, path, status=400, **params)["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("explain", {}, "prompt"),
        ("explain", {"prompt": "x", "temperature": 1}, "temperature"),
        ("explain", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ("explain", {"prompt": [-1]}, "prompt"),
        ("plan", {"prompt": "x", "n": 0}, "n"),
        ("plan", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("plan", {"prompt": "x", "max_tokens": 1 << 20}, "max_tokens"),
        ("plan", {"prompt": "x", "priority": 1 << 40}, "priority"),
        ("warm", {"prompt": "x", "priority": 1 << 40}, "priority"),
        ("warm", {"prompt": [1] * 9000}, "prompt"),
        ("evict", {}, "prompt"),
        ("evict", {"all": True, "prompt": "x"}, "all"),
        ("evict", {"prompt": "x", "messages": []}, "prompt"),
        ("clear", {"all": True}, "all"),
    ],
)
def test_wrong_bodies_are_named(stack: Stack, path: str, body: dict[str, Any], param: str) -> None:
    assert post(stack, path, body, status=400)["error"]["param"] == param
