"""Whatever dies and whoever reconnects, wherever it is cut: the parts put together are the whole."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.api.sse import DONE
from services.errors import ApiError
from services.streams.file_journal import STILL
from services.streams.journal import Dropped
from tests.services.fake_stack import served_model
from tests.services.stream_frontends import Frontend, settle


@dataclass
class Client:
    """What a client has put together."""

    after: int = 0
    events: list[bytes] = field(default_factory=list)

    async def read(self, frontend: Frontend, stream_id: str, most: int = 1 << 30) -> bool:
        """Ask for what is after the last event that it has; take at most `most`. Whether that was the end."""
        source = await frontend.streams.source(stream_id, "")
        await settle()
        new = source.state.ring.since(self.after)[:most]
        self.after += len(new)
        self.events += new
        ended = source.state.ended and self.after == source.state.ring.next - 1
        await source.close()
        return ended

    def whole(self) -> list[Any]:
        """Per choice: text, tokens, log-probabilities, why it ended; and the usage."""
        assert self.events[-1] == DONE
        assert DONE not in self.events[:-1]
        chunks = [json.loads(event[6:]) for event in self.events[:-1]]
        result: dict[int, list[Any]] = {}
        usage = None
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                kept = result.setdefault(choice["index"], ["", [], [], None, None])
                kept[0] += choice["text"]
                kept[1] += choice.get("token_ids", [])
                kept[2] += (choice["logprobs"] or {}).get("token_logprobs", [])
                if choice["finish_reason"]:
                    assert kept[3] is None, "it ended twice"
                    kept[3:] = [choice["finish_reason"], choice["stop_reason"]]
        return [result, usage]


def plan_of(texts: Sequence[str]) -> list[list[int]]:
    model = served_model()
    return [[*model.tokenizer.encode(text, False), model.eos_token_ids[0]] for text in texts]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.integers(1, 4)),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["kill", "stop", "stand still"]), st.just(0)),
        st.tuples(st.just("read elsewhere"), st.integers(0, 3)),
    ),
    max_size=24,
)
TEXTS = st.lists(st.text(alphabet=st.sampled_from("ab 🙂é日\nSTOP"), max_size=24), min_size=1, max_size=2)
FORMS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just(0),
        "echo": st.just(True),
        "return_token_ids": st.just(True),
        "stop": st.sampled_from([["ST"], ["STOP", "a🙂"], ["b "]]),
        "include_stop_str_in_output": st.just(True),
    },
)


@settings(max_examples=120)
@given(TEXTS, FORMS, st.booleans(), ACTIONS)
def test_the_parts_are_the_whole(
    texts: list[str], form: dict[str, Any], usage: bool, actions: list[tuple[str, int]]
) -> None:
    plan = plan_of(texts)
    options = {"resumable": True, "include_usage": usage}
    body = {"n": len(texts), "max_tokens": 100, "stream": True, "stream_options": options, **form}

    async def undisturbed(folder: str) -> Client:
        frontend, client = Frontend(folder, plan.__getitem__), Client()
        stream_id = await frontend.begin(body)
        await frontend.step(1000)
        assert await client.read(frontend, stream_id)
        return client

    async def disturbed(folder: str) -> Client:
        pair = [Frontend(folder, plan.__getitem__) for _ in range(2)]
        client, at = Client(), 0
        stream_id = await pair[at].begin(body)
        await pair[at].step(1)  # a client knows the id once there is something to say
        for action, number in actions:
            if action == "tokens":
                for frontend in pair:
                    await frontend.step(number)
            elif action in ("kill", "stop"):
                await (pair[at].die() if action == "kill" else pair[at].streams.stop())
                pair[at] = Frontend(folder, plan.__getitem__)
            elif action == "stand still":  # as others see it, who take the stream over; then it goes on
                os.utime(Path(folder) / "streams" / stream_id, (0, time.time() - STILL - 1))
            else:
                at = 1 - at if action == "read elsewhere" else at
                await client.read(pair[at], stream_id, number)
        while not await client.read(pair[at], stream_id):
            for frontend in pair:
                await frontend.step(1)
        assert sum(frontend.run(stream_id) is not None for frontend in pair) == 0
        return client

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as one,
        tempfile.TemporaryDirectory(dir="/dev/shm") as two,
    ):
        whole = asyncio.run(undisturbed(one))
        assert asyncio.run(disturbed(two)).whole() == whole.whole()


def test_what_a_reader_missed_is_gone_once_the_ring_is_full() -> None:
    plan = plan_of(["word " * 80])

    async def test(folder: str) -> None:
        frontend, client = Frontend(folder, plan.__getitem__, max_bytes=4096), Client()
        stream_id = await frontend.begin({"max_tokens": 200, "stream": True})
        for _ in range(100):
            await frontend.step(1)
        with pytest.raises(Dropped):
            await client.read(frontend, stream_id)
        await frontend.die()
        heir = Frontend(folder, plan.__getitem__, max_bytes=4096)
        source = await heir.streams.source(stream_id, "")
        client.after = source.state.ring.first - 1
        await source.close()
        assert client.after > 60
        await heir.step(1000)
        assert await client.read(heir, stream_id)
        ((text, *_),) = client.whole()[0].values()
        assert text
        assert ("word " * 80).endswith(text)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(test(folder))


def test_a_stream_of_another_key_is_unknown() -> None:
    async def test(folder: str) -> None:
        frontend = Frontend(folder, plan_of(["a"]).__getitem__)
        stream_id = await frontend.begin({"max_tokens": 9, "stream": True})
        await frontend.step(1)
        for other in (frontend, Frontend(folder, plan_of(["a"]).__getitem__)):
            with pytest.raises(ApiError) as refused:
                await other.streams.source(stream_id, "somebody")
            assert refused.value.status == 404
        await frontend.die()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(test(folder))
