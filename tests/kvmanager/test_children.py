"""Children of a parent, against a naive twin: which is most alike, which is covered."""

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.pool.children import Children, num_shared
from kvmanager.pool.hashing import token_array

TEXT = st.lists(st.sampled_from([0, 1, 256, 1 << 31]), min_size=1, max_size=4).map(
    lambda tokens: token_array(tokens).tobytes()
)
CHILDREN = st.lists(st.tuples(st.sampled_from([b"p", b"q"]), TEXT), max_size=12)


def naive_shared(one: bytes, other: bytes) -> int:
    count = 0
    while count * 4 < min(len(one), len(other)) and one[count * 4 : count * 4 + 4] == other[count * 4 :][:4]:
        count += 1
    return count


@given(TEXT, TEXT)
def test_shared_tokens_are_counted_whole(one: bytes, other: bytes) -> None:
    assert num_shared(one, other) == naive_shared(one, other)


@given(CHILDREN, TEXT, st.data())
def test_children_are_a_list_that_is_searched(
    added: list[tuple[bytes, bytes]], text: bytes, data: st.DataObject
) -> None:
    children = Children([(b"", b"", b"", tokens) for _, tokens in added])
    naive: dict[int, tuple[bytes, bytes]] = {}
    for block, (key, tokens) in enumerate(added):
        siblings = any(other == key for other, _ in naive.values())
        assert children.add(key, block) == siblings
        naive[block] = (key, tokens)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(naive)))
            children.remove(naive.pop(gone)[0], gone)
    assert children.entries() == naive
    for key in (b"p", b"q"):
        family = {block: tokens for block, (other, tokens) in naive.items() if other == key}
        found, most = children.most_alike(key, text)
        assert most == max((naive_shared(tokens, text) for tokens in family.values()), default=0)
        assert not most or naive_shared(family[found], text) == most
        for block, tokens in family.items():
            longer = any(other.startswith(tokens) and other != tokens for other in family.values())
            equal = any(other == tokens and number < block for number, other in family.items())
            assert children.is_covered(key, block) == (longer or equal)


def test_a_new_child_covers_those_that_it_goes_on_from() -> None:
    texts = [token_array(tokens).tobytes() for tokens in ([1], [1, 2], [1, 2], [2], [1, 2, 3])]
    children = Children([(b"", b"", b"", tokens) for tokens in texts])
    for block in range(len(texts)):
        children.add(b"p", block)
    assert list(children.beginnings(b"p", texts[4])) == [2, 1, 0]
    assert [children.is_covered(b"p", block) for block in range(len(texts))] == [
        True,
        True,
        True,
        False,
        False,
    ]
