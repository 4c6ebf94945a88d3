"""Free queue, prefix index, ledger, hashes, waiting queue: each against a naive twin, and by example."""

import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.pool.free_queue import FreeQueue
from kvmanager.pool.hashing import block_hash, root_hash, salt_digest, token_array
from kvmanager.pool.ledger import Holder, Ledger
from kvmanager.pool.prefix_index import PrefixIndex
from kvmanager.protocol import PROTOCOL_VERSION, FrontendHello, Layout
from kvmanager.scheduling.clients import Frontend
from kvmanager.scheduling.requests import Request, WaitingQueue
from tests.kvmanager.fake_clients import LAYOUT, submission


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "pop"]), st.integers(0, 7))))
def test_free_queue_is_a_list_in_order(operations: list[tuple[str, int]]) -> None:
    queue, naive = FreeQueue(8), list[int]()
    for operation, block in operations:
        if operation == "append" and block not in naive:
            queue.append(block)
            naive.append(block)
        elif operation == "prepend" and block not in naive:
            queue.prepend(block)
            naive.insert(0, block)
        elif operation == "remove" and block in naive:
            queue.remove(block)
            naive.remove(block)
        elif operation == "pop" and naive:
            assert queue.pop() == naive.pop(0)
        assert list(queue) == naive
        assert len(queue) == len(naive)
        assert [number in queue for number in range(8)] == [number in naive for number in range(8)]


def test_free_queue_refuses_misuse() -> None:
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match="empty"):
        queue.pop()
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(1)
    queue.append(1)
    with pytest.raises(AssertionError, match="already"):
        queue.append(1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5))))
def test_prefix_index_finds_the_oldest_copy_until_the_last_is_gone(toggles: list[tuple[int, int]]) -> None:
    index, naive = PrefixIndex(), dict[bytes, list[int]]()
    for content, block in toggles:
        digest = bytes([content])
        others = [blocks for key, blocks in naive.items() if key != digest]
        if any(block in blocks for blocks in others):
            continue
        blocks = naive.setdefault(digest, [])
        if block in blocks:
            blocks.remove(block)
            assert index.remove(digest, block) == (not blocks)
        else:
            blocks.append(block)
            index.add(digest, block)
        assert index.find(digest) == (blocks[0] if blocks else None)
        assert index.entries() == {key: found for key, found in naive.items() if found}
        assert len(index) == len(index.entries())


class Someone(Holder):
    """A holder with a name."""

    def describe(self) -> str:
        return "someone"


def test_ledger_knows_each_holder_once() -> None:
    ledger, one, two, three = Ledger(2), Someone(b""), Someone(b""), Someone(b"")
    ledger.add(1, one)
    ledger.replace(1, one, two)
    ledger.add(1, one)
    assert set(ledger.holders(1)) == {one, two}
    ledger.replace(1, one, three)
    assert (set(ledger.holders(1)), ledger.ref_count(1), ledger.ref_count(0)) == ({two, three}, 2, 0)
    assert not ledger.remove(1, two)
    assert ledger.remove(1, three)


def test_ledger_refuses_misuse() -> None:
    ledger, one, two = Ledger(1), Someone(b""), Someone(b"")
    ledger.add(0, one)
    with pytest.raises(AssertionError, match="someone already"):
        ledger.add(0, one)
    with pytest.raises(AssertionError, match="someone does not"):
        ledger.remove(0, two)


def test_a_holder_must_say_who_it_is() -> None:
    with pytest.raises(NotImplementedError):
        Holder(b"").describe()


def test_block_hash_is_sha256_over_tagged_fields() -> None:
    tokens = token_array([1, 2, 3, 4]).tobytes()
    plain = b"P" * 32 + b"T" + (16).to_bytes(4, "little") + tokens
    assert block_hash(b"P" * 32, tokens, b"") == sha256(plain).digest()
    salt = sha256(b"mine").digest()
    assert salt_digest("mine") == salt
    assert (
        block_hash(b"P" * 32, tokens, salt)
        == sha256(plain + b"S" + (32).to_bytes(4, "little") + salt).digest()
    )


def test_the_same_text_has_the_same_hash_in_every_process() -> None:
    code = (
        "from kvmanager.pool.hashing import *; from tests.kvmanager.fake_clients import LAYOUT;"
        "print(block_hash(root_hash(LAYOUT), token_array([5, 6, 7, 8]).tobytes(), salt_digest('s')).hex())"
    )
    here = block_hash(root_hash(LAYOUT), token_array([5, 6, 7, 8]).tobytes(), salt_digest("s")).hex()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert run.stdout.strip() == here


def test_layouts_that_differ_in_any_field_have_different_roots() -> None:
    variants = [
        LAYOUT,
        Layout("other", "float32", 4, 1, 1, 2),
        Layout("fingerprint", "float16", 4, 1, 1, 2),
        Layout("fingerprint", "float32", 8, 1, 1, 2),
        Layout("fingerprint", "float32", 4, 2, 1, 2),
        Layout("fingerprint", "float32", 4, 1, 2, 2),
        Layout("fingerprint", "float32", 4, 1, 1, 4),
    ]
    assert len({root_hash(layout) for layout in variants}) == len(variants)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12), st.data())
def test_waiting_queue_is_sorted_by_priority_arrival_and_coming(
    places: list[tuple[int, int]], data: st.DataObject
) -> None:
    frontend = Frontend(1, FrontendHello(PROTOCOL_VERSION, "f", "f", "f"))
    queue, naive = WaitingQueue(), list[Request]()
    for serial, (priority, arrival) in enumerate(places):
        message = submission("r", [1], arrival=float(arrival), priority=priority)
        request = Request(frontend, message, serial)
        queue.add(request)
        naive.append(request)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(naive))
            queue.remove(gone)
            naive.remove(gone)
        naive.sort(key=lambda waiting: waiting.order)
        assert list(queue) == naive
        assert len(queue) == len(naive)
        assert not naive or queue.first is naive[0]
