"""What is in a hash: equal tokens under another salt, tenant, adapter or model never meet."""

from dataclasses import dataclass
from hashlib import sha256
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmanager.pool.hashing import block_hash, field, root_hash, salt_digest, token_array
from kvmanager.protocol import Layout
from tests.kvmanager.fake_clients import LAYOUT, submission
from tests.kvmanager.scene import Scene

TENANTS = st.sampled_from(["", "0" * 32, "1" * 32])
LAYOUTS = st.sampled_from(
    [
        LAYOUT,
        replace(LAYOUT, model="another"),
        replace(LAYOUT, dtype="float16"),
        replace(LAYOUT, num_layers=LAYOUT.num_layers + 1),
        replace(LAYOUT, num_layers=LAYOUT.num_kv_heads, num_kv_heads=LAYOUT.num_layers + 10),
    ]
)


@dataclass(frozen=True)
class Content:
    """All that a block's KV depends on, and who may use it."""

    layout: Layout
    salt: str
    tenant: str
    blocks: tuple[tuple[int, ...], ...]  # of tokens, from the first on

    def hash(self) -> bytes:
        digest, salt = root_hash(self.layout), salt_digest(self.salt, self.tenant)
        for tokens in self.blocks:
            digest = block_hash(digest, token_array(tokens).tobytes(), salt)
        return digest


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
CONTENTS = st.builds(
    Content,
    LAYOUTS,
    st.sampled_from(["", "a", "b", "ab"]),
    TENANTS,
    st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
)


@given(CONTENTS, CONTENTS)
def test_two_contents_have_one_hash_only_if_they_are_equal(one: Content, other: Content) -> None:
    assert (one.hash() == other.hash()) == (one == other)


FIELDS = st.lists(st.tuples(st.sampled_from([b"T", b"S", b"A"]), st.binary(max_size=40)), max_size=4)


def parsed(data: bytes) -> list[tuple[bytes, bytes]]:
    """Tagged, length-prefixed fields, as anybody can read them back."""
    fields = []
    while data:
        end = 5 + int.from_bytes(data[1:5], "little")
        fields.append((data[:1], data[5:end]))
        data = data[end:]
    return fields


@given(FIELDS)
def test_what_is_hashed_says_where_each_field_ends(fields: list[tuple[bytes, bytes]]) -> None:
    assert parsed(b"".join(field(*each) for each in fields)) == fields


@given(
    st.binary(min_size=4, max_size=16), st.sampled_from([b"", b"s" * 32]), st.binary(min_size=1, max_size=40)
)
def test_a_further_field_gives_another_hash_and_its_absence_the_same(
    tokens: bytes, salt: bytes, adapter: bytes
) -> None:
    """An adapter would be such a field: those who use none would find what they found before."""
    parent = b"P" * 32
    fields = [field(b"T", tokens)] + ([field(b"S", salt)] if salt else [])
    with_adapter = sha256(parent + b"".join(chain(fields, [field(b"A", adapter)]))).digest()
    without = sha256(parent + b"".join(fields)).digest()
    assert block_hash(parent, tokens, salt) == without
    assert with_adapter not in (without, block_hash(parent, tokens, adapter))
    assert with_adapter != sha256(parent + b"".join([*fields, field(b"A", adapter + b"x")])).digest()


@given(st.sampled_from(["", "red"]), TENANTS, st.sampled_from(["", "red"]), TENANTS)
def test_a_request_finds_only_what_its_own_salt_and_tenant_have_left(
    salt: str, tenant: str, other_salt: str, other_tenant: str
) -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    first = submission("a", [1] * 9, max_tokens=1, salt=salt)
    start, _ = scene.submit(frontend, runner, replace(first, tenant=tenant))
    scene.end(runner, start, 9)
    second = submission("b", [1] * 9, max_tokens=1, salt=other_salt)
    _, sequence = scene.submit(frontend, runner, replace(second, tenant=other_tenant))
    same = (salt, tenant) == (other_salt, other_tenant)
    assert sequence.num_cached_tokens == (8 if same else 0)
    assert (sequence.copy_from is None) == (sequence.num_cached_tokens % 4 == 0)
