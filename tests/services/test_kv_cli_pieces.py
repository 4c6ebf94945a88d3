"""What `pagekeeper kv` is made of: prompts as typed, texts as shown, streams as they come."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.terminal import kv, kv_views
from services.terminal.kv import as_body
from services.terminal.kv_client import Event, as_json, one_line, read_events, shown
from services.terminal.server_errors import ServerError


@given(st.text())
def test_no_text_moves_the_cursor(text: str) -> None:
    for code in map(ord, shown(text)):
        assert code in (9, 10) or not (code < 32 or 127 <= code < 160)
    assert "\n" not in one_line(text)


@given(st.text() | st.text('\x7f\x9b\u202e\u2066\\"\né'))
def test_json_moves_no_cursor_and_says_the_same(text: str) -> None:
    line = as_json({"text": text})
    assert json.loads(line) == {"text": text}
    assert shown(line) == line
    assert "\n" not in line


@given(st.text())
def test_any_text_can_be_asked_about(text: str) -> None:
    assert set(as_body(text)) <= {"prompt", "messages", *kv.REQUEST_FIELDS}
    assert as_body(text, raw=True) == {"prompt": text}
    assert as_body(text, chat=True) == {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("[1, 2]", {"prompt": [1, 2]}),
        ("[true]", {"prompt": "[true]"}),
        ("[]", {"prompt": "[]"}),
        ("{not json", {"prompt": "{not json"}),
        ('[{"role": "user", "content": "a"}]', {"messages": [{"role": "user", "content": "a"}]}),
        ('{"messages": [], "n": 2, "cache_salt": "s"}', {"messages": [], "cache_salt": "s"}),
    ],
)
def test_json_is_understood(text: str, body: dict[str, object]) -> None:
    assert as_body(text) == body


@given(st.integers(0, 300), st.integers(1, 20), st.data())
def test_the_strip_counts_every_block_once(tokens: int, size: int, data: st.DataObject) -> None:
    tokens = max(1, tokens)
    cached_tokens = data.draw(st.integers(0, tokens - 1))
    blocks = [{"block": 0, "tier": "pool"}] * (cached_tokens // size)
    answer = {"num_tokens": tokens, "cached_tokens": cached_tokens, "block_size": size, "blocks": blocks}
    kinds = [kv_views.kind_of(answer, index) for index in range(-(-tokens // size))]
    assert kinds == sorted(kinds, key=["hit", "copied", "compute"].index)
    assert kinds.count("copied") <= 1


@given(st.lists(st.binary(max_size=20)), st.integers(1, 9))
def test_events_are_read_however_they_are_cut(noise: list[bytes], step: int) -> None:
    text = "a\u2028é\r"
    parts = [b": " + line.replace(b"\n", b" ") + b"\n" for line in noise]
    whole = b"".join(parts) + f"event: stored\nid: b:1\ndata: {json.dumps({'text': text})}\n\n".encode()
    pieces = [whole[at : at + step] for at in range(0, len(whole), step)]
    found = []
    with pytest.raises(ServerError, match="ended"):
        found.extend(read_events(pieces))
    found = []
    for event in read_events([*pieces, b"\n"]):
        found.append(event)
        break
    assert found == [Event("stored", {"text": text}, "b:1")]


@pytest.mark.parametrize("data", [b"nothing", b"[1]"])
def test_an_event_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ServerError, match="no JSON object"):
        list(read_events([b"data: " + data + b"\n\n"]))


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ({}, "starting"),
        ({"ready": True}, "ready"),
        ({"ready": True, "draining": True}, "draining"),
        ({"ready": True, "draining": True, "stuck": True}, "stuck"),
    ],
)
def test_a_runner_is_shown_in_its_worst_state(flags: dict[str, bool], state: str) -> None:
    card = {
        "name": "r",
        "ready": False,
        "draining": False,
        "stuck": False,
        "running": 1,
        "credits": 2,
        **flags,
    }
    assert kv_views.runner(card).plain == f"● r {state}, 1 running, 2 blocks in credit"
