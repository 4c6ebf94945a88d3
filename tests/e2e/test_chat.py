"""The `openai` package, unchanged, against real processes and the real model."""

import asyncio

import openai
import pytest

from tests.e2e.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture
def client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_chat_answers_the_question(client: openai.OpenAI, served: Server) -> None:
    answer = client.chat.completions.create(
        model=served.model, messages=QUESTION, temperature=0, max_tokens=24
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_the_unstreamed(client: openai.OpenAI, served: Server) -> None:
    ask = {"model": served.model, "messages": QUESTION, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_async_streams_side_by_side(served: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=served.model, prompt=f"Count: {number},", temperature=0, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    together = asyncio.run(all_of_them())
    alone = [served.text(f"Count: {number},", max_tokens=24) for number in range(12)]
    assert together == alone


def test_bad_requests_name_the_field(client: openai.OpenAI, served: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=QUESTION, max_tokens=1_000_000)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
