"""What a tenant learns: of its own everything, of others nothing; on the real core, over random histories.

Every text says whose it is: A's tokens are 1 to 9, B's 100 to 109, those of plain keys 200 to 209. The
model's own tokens, 0 to 2, are everybody's.
"""

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.protocol import At, Pin, own_number
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


def play(world: KvWorld, history: list[tuple[str, str, list[int], int]], first: int = 0) -> None:
    for number, (what, owner, text, steps) in enumerate(history, first):
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
    for block in [*range(3), *found["map"]["blocks"]]:
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
    """Its numbers of those with its content, and of those that its running sequences write."""
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
    return {own_number(pool.block_hash[block]) for block in own | held}


def foreign_hashes(world: KvWorld, tenant: str) -> set[str]:
    pool, prefix = world.core.state.pool, bytes.fromhex(tenant)
    assert pool is not None
    return {
        pool.block_hash[block].hex()
        for block in range(world.num_blocks)
        if pool.tokens[block] and pool.block_hash[block] and not pool.salt[block].startswith(prefix)
    }


@settings(max_examples=15, deadline=None)
@given(histories)
def test_a_tenant_learns_nothing_of_others(history: list[tuple[str, str, list[int], int]]) -> None:
    world = KvWorld()
    play(world, history)
    answers = everything(world, "a", A)
    hashes = foreign_hashes(world, A)
    mine = blocks_of(world, A)
    for path, answer in answers.items():
        said = json.dumps(answer)
        asked = int(path[7:]) if path.startswith("blocks/") else -2
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
        assert asked == -2 or asked in mine, path
    for command in ("explain", "plan"):
        for name in ("b", "plain"):
            answer = answers[f"{command} {name}"]
            assert answer["cached_tokens"] == 0
            assert (answer.get("difference") or {"cached": {"block": -2}})["cached"]["block"] in {*mine, -2}
    assert len(answers["map"]["states"]) == len(held(world, A)) == len(set(answers["map"]["blocks"]))


def test_a_tenants_pins_are_within_its_own_budget_and_an_admin_may_end_them() -> None:
    world = KvWorld(40)
    for key, tenant in (("a", A), ("b", B)):
        world.run([FIRST[tenant]] * 20, tenant)
        pinned = {"prompt": [FIRST[tenant]] * 20, "name": "mine"}
        world.post(key, "pins", **pinned)
    assert world.get("a", "pins")["budget_blocks"] == 8
    world.run([FIRST[A], *[0] * 40], A)
    refused = world.http("a", "POST", "pins", json={"prompt": [FIRST[A], *[0] * 40], "name": "more"})
    assert (refused.status_code, "tenant_pin_budget allows 8 of 40" in refused.text) == (409, True)
    assert [pin["tenant"] for pin in world.get("root", "pins")["data"]] == [A, B]
    for key, whose, status in (("a", B, 400), ("root", "x", 400), ("root", B, 200)):
        answer = world.http(key, "DELETE", "pins", params={"name": "mine", "tenant": whose})
        assert answer.status_code == status, answer.text
    assert [pin["tenant"] for pin in world.get("root", "pins")["data"]] == [A]


class Timeless(KvWorld):
    """Where everything happens at once: so all times are the same."""

    def tick(self) -> float:
        return self.now


@settings(max_examples=15, deadline=None)
@given(histories)
def test_a_tenant_is_told_the_same_whatever_others_do(history: list[tuple[str, str, list[int], int]]) -> None:
    """To the last byte, where there is room for all and its own requests have ended."""
    alone, among = Timeless(128), Timeless(128)
    for world in (alone, among):
        world.get("b", "stats")
    for number, (what, owner, text, steps) in enumerate(history):
        for world in (alone, among):
            if owner == B or world is among:
                play(world, [(what, owner, text, 40 if owner == B else steps)], number)
            elif what == "run":
                for _ in range(steps):
                    world.runner.step()
    assert among.core.state.at().sequence >= alone.core.state.at().sequence
    assert everything(among, "b", B) == everything(alone, "b", B)
    assert among.events(B) == alone.events(B)
    boot = alone.core.state.boot_id
    assert (
        among.events(B, At(boot, 0)).decode().splitlines()
        == alone.events(B, At(boot, 0)).decode().splitlines()
    )


@settings(max_examples=12, deadline=None)
@given(histories)
def test_a_tenant_follows_its_own_events_only(history: list[tuple[str, str, list[int], int]]) -> None:
    world = KvWorld()
    starts = {owner: world.core.state.at(owner) for owner in ("", A)}
    play(world, history)
    for said in (world.events(A).decode(), world.events(A, starts[A]).decode()):
        assert not re.search(r"\b(b|plain)-(run|pin|evict)-", said)
        assert not re.search(r"<[12]\d\d>", said)
        assert not [digest for digest in foreign_hashes(world, A) if digest in said]
    assert follow(world.events(A).decode()) == held(world, A) == follow(world.events(A, starts[A]).decode())
    assert (
        follow(world.events("").decode()) == held(world, "") == follow(world.events("", starts[""]).decode())
    )


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


@settings(max_examples=12, deadline=None)
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
