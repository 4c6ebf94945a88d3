"""What a tenant learns: of its own everything, of others nothing; on the real core, over random histories.

Every text says whose it is: A's tokens are 1 to 9, B's 100 to 109, those of plain keys 200 to 209. The
model's own tokens, 0 to 2, are everybody's.
"""

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.protocol import Pin
from services.auth import tenant_of
from tests.services.kv_world import KvWorld

A, B = tenant_of(b"a"), tenant_of(b"b")
FIRST = {A: 1, B: 100, "": 200}
NAME = {A: "a", B: "b", "": "plain"}

owners = st.sampled_from([A, B, ""])
texts = st.lists(st.integers(0, 8), min_size=1, max_size=14).map(lambda tail: [*([0] * 8), *tail])
events = st.one_of(
    st.tuples(st.just("run"), owners, texts, st.integers(0, 9)),
    st.tuples(st.just("run"), owners, texts, st.integers(0, 9)),
    st.tuples(st.just("pin"), owners, texts, st.just(0)),
    st.tuples(st.just("evict"), owners, texts, st.just(0)),
)
histories = st.lists(events, min_size=4, max_size=14)


def play(world: KvWorld, history: list[tuple[str, str, list[int], int]]) -> None:
    for number, (what, owner, text, steps) in enumerate(history):
        tokens = [FIRST[owner] + token for token in text]
        name = f"{NAME[owner]}-{what}-{number}"
        if what == "run":
            world.run(tokens, owner, steps, name=name, salt="s" if number % 4 == 3 else "")
        elif what == "pin":
            world.asker.send(Pin(5, name, tuple(tokens), "", 1e6, owner))
            world.asker.inbox.pop()
        elif owner:
            world.post(NAME[owner], "evict", prompt=tokens)


def everything(world: KvWorld, key: str, tenant: str) -> dict[str, Any]:
    """Every answer that a tenant can get."""
    found = {
        path: world.get(key, path)
        for path in (
            "stats",
            "map",
            "prefixes",
            "requests",
            "holders",
            "pins",
            "prefixes?q=%3C",
            "requests?limit=1",
        )
    }
    for block in range(world.num_blocks):
        found[f"blocks/{block}"] = world.http(key, "GET", f"blocks/{block}").json()
    for owner, name in NAME.items():
        tokens = [FIRST[owner]] * 8 + [FIRST[owner] + 1] * 3
        if owner == tenant:
            for request in found["requests"]["requests"]:
                found[request["request_id"]] = world.get(key, f"requests/{request['request_id']}")
        for command in ("explain", "plan"):
            body = {"prompt": tokens, **({"max_tokens": 100} if command == "plan" else {})}
            found[f"{command} {name}"] = world.post(key, command, **body)
    return found


def numbers(value: Any, *names: str) -> set[int]:
    """All numbers under these keys, however deep."""
    if isinstance(value, dict):
        own = {n for name in names for n in flat(value.get(name))}
        return own.union(*(numbers(item, *names) for item in value.values()), set())
    if isinstance(value, list):
        return set().union(*(numbers(item, *names) for item in value))
    return set()


def flat(value: Any) -> list[int]:
    if isinstance(value, list):
        return [n for item in value for n in flat(item)]
    return [value] if isinstance(value, int) else []


def blocks_of(world: KvWorld, tenant: str) -> set[int]:
    """Those with its content, and those that its running sequences write."""
    state, prefix = world.core.state, bytes.fromhex(tenant)
    pool = state.pool
    assert pool is not None
    held = {
        block
        for active in state.actives()
        if active.request.submit.tenant == tenant
        for sequence in active.sequences.values()
        for block in sequence.table
    }
    own = {b for b in range(world.num_blocks) if pool.tokens[b] and pool.salt[b].startswith(prefix)}
    return own | held


def foreign_hashes(world: KvWorld, tenant: str) -> set[str]:
    pool, prefix = world.core.state.pool, bytes.fromhex(tenant)
    assert pool is not None
    return {
        pool.block_hash[block].hex()
        for block in range(world.num_blocks)
        if pool.tokens[block] and pool.block_hash[block] and not pool.salt[block].startswith(prefix)
    }


@settings(max_examples=25, deadline=None)
@given(histories)
def test_a_tenant_learns_nothing_of_others(history: list[tuple[str, str, list[int], int]]) -> None:
    world = KvWorld()
    play(world, history)
    answers = everything(world, "a", A)
    hashes = foreign_hashes(world, A)
    mine = blocks_of(world, A)
    for path, answer in answers.items():
        said = json.dumps(answer)
        asked = int(path[7:]) if path.startswith("blocks/") else -1
        own_words = path.startswith(("explain", "plan"))  # the prompt that was asked about comes back
        assert not re.search(r"\b(b|plain)-(run|pin|evict)-", said), path
        assert not [digest for digest in hashes if digest in said], path
        if not own_words:
            assert not re.search(r"<[12]\d\d>", said), path
            assert not [t for t in numbers(answer, "token_ids") if t >= 100], path
        if answer.get("error") or answer.get("state") == "FREE":
            continue
        named = numbers(answer, "block", "parent_block", "copies") - {asked}
        assert named <= mine, path
        assert asked < 0 or asked in mine, path
    for command in ("explain", "plan"):
        for name in ("b", "plain"):
            answer = answers[f"{command} {name}"]
            assert answer["cached_tokens"] == 0
            assert (answer.get("difference") or {"cached": {"block": -1}})["cached"]["block"] in {*mine, -1}
    shown = answers["map"]["states"]
    pool = world.core.state.pool
    assert pool is not None
    for block in range(world.num_blocks):
        foreign = block not in mine and pool.state[block] != 0
        assert (shown[block] == "X") == foreign
        if foreign:
            assert answers["map"]["ages"][block] == answers["map"]["num_tokens"][block] == 0
            assert answers["map"]["ref_counts"][block] == 0


@settings(max_examples=20, deadline=None)
@given(histories)
def test_a_tenant_follows_its_own_events_only(history: list[tuple[str, str, list[int], int]]) -> None:
    world = KvWorld()
    start = world.core.state.at()
    play(world, history)
    for said in (world.events(A).decode(), world.events(A, start).decode()):
        assert not re.search(r"\b(b|plain)-(run|pin|evict)-", said)
        assert not re.search(r"<[12]\d\d>", said)
        assert not [digest for digest in foreign_hashes(world, A) if digest in said]
    assert follow(world.events(A).decode()) == held(world, A) == follow(world.events(A, start).decode())
    assert follow(world.events("").decode()) == held(world, "") == follow(world.events("", start).decode())


def held(world: KvWorld, tenant: str) -> set[str]:
    pool, prefix = world.core.state.pool, bytes.fromhex(tenant)
    assert pool is not None
    return {
        pool.block_hash[block].hex()
        for block in range(world.num_blocks)
        if pool.block_hash[block] and block not in pool.unfound and pool.salt[block].startswith(prefix)
    }


def follow(stream: str) -> set[str]:
    """What is cached by the word of a stream of events."""
    found: set[str] = set()
    for block in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = json.loads(fields.get("data", "{}"))
        match fields.get("event"):
            case "snapshot":
                found |= {entry["hash"] for entry in data["blocks"]}
            case "stored":
                found.add(data["hash"])
            case "removed":
                found.discard(data["hash"])
            case "cleared":
                found.clear()
    return found


@settings(max_examples=20, deadline=None)
@given(histories, st.sampled_from(["evict", "clear", "force", "pins"]))
def test_a_tenants_commands_leave_others_alone(
    history: list[tuple[str, str, list[int], int]], command: str
) -> None:
    world = KvWorld()
    play(world, history)
    before = {owner: held(world, owner) for owner in (B,)}
    plain = held(world, "") - held(world, A)
    others = [pin for pin in world.get("root", "pins")["data"] if not pin["name"].startswith("a-")]
    if command == "evict":
        assert world.http("a", "POST", "evict", json={"all": True}).status_code == 200
    elif command == "pins":
        for pin in others:
            answer = world.http("a", "DELETE", "pins", params={"name": pin["name"]})
            assert answer.status_code == 404
    else:
        answer = world.http("a", "POST", "clear", json={"force": command == "force"})
        assert answer.status_code in (200, 409)
        assert not re.search(r"\b(b|plain)-(run|pin)-", answer.text)
        if answer.status_code == 200:
            assert held(world, A) == set()
    assert {B: held(world, B)} == before
    assert held(world, "") - held(world, A) == plain
    after = [pin for pin in world.get("root", "pins")["data"] if not pin["name"].startswith("a-")]
    assert [pin["name"] for pin in after] == [pin["name"] for pin in others]
