"""Real HTTP against a real frontend, with a fake manager and runner behind real sockets."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.api.chat import render_prompt
from services.api.openai_types import ChatMessage, TokenizeRequest
from services.errors import ApiError
from tests.services.fake_stack import Stack, events, says, wait_until

EMOJI = "Hi 👋🏽 there, 👩‍👩‍👧 and 🇫🇷! Ça va? 你好。"
QUESTION = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.manager.script = says(EMOJI)
    shared.manager.submits.clear()
    shared.manager.cancels.clear()
    shared.manager.cached_tokens = 0
    shared.manager.tokens_per_event = 1
    return shared


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=20)


def post(stack: Stack, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json=body, timeout=20, **options)


def complete(stack: Stack, **fields: Any) -> Any:
    answer = post(stack, "/v1/completions", {"prompt": "Hello", "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(stack: Stack, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    base: dict[str, Any] = (
        {"prompt": "Hello", "max_tokens": 100} if "chat" not in path else {"messages": QUESTION}
    )
    answer = post(stack, path, {**base, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text.splitlines())


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


# --- the openai package -----------------------------------------------------------------------------------


def test_openai_client_chat(client: openai.OpenAI, stack: Stack) -> None:
    stack.manager.cached_tokens = 16
    answer = client.chat.completions.create(model=stack.model.name, messages=QUESTION)
    assert answer.choices[0].message.content == EMOJI
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    expected = len(stack.model.tokenizer.encode(EMOJI)) + 1  # and the end-of-text token
    assert answer.usage.completion_tokens == expected


def test_openai_client_streams_chat(client: openai.OpenAI, stack: Stack) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=stack.model.name, messages=QUESTION, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == EMOJI
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks if c.choices)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert (
        chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )


async def _async_texts(stack: Stack) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", timeout=20) as client:

        async def one() -> str:
            chunks = await client.completions.create(
                model=stack.model.name, prompt="x", max_tokens=99, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

        return await asyncio.gather(*(one() for _ in range(16)))


def test_openai_client_async_streams_side_by_side(stack: Stack) -> None:
    assert asyncio.run(_async_texts(stack)) == [EMOJI] * 16


def test_openai_client_models(client: openai.OpenAI, stack: Stack) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == stack.model.name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_event", [1, 3, 100])
def test_chunks_put_together_are_the_unstreamed_text(stack: Stack, per_event: int) -> None:
    stack.manager.tokens_per_event = per_event
    chunks = stream(stack)
    assert joined(chunks) == complete(stack)["choices"][0]["text"] == EMOJI
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] is None
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("per_event", [1, 100])
def test_a_stop_string_over_tokens_never_leaks_and_cancels(stack: Stack, per_event: int) -> None:
    stack.manager.tokens_per_event = per_event
    stack.manager.script = says("one two three four five six seven eight " * 20)
    chunks = stream(stack, stop=["ree fo", "zzz"], max_tokens=1000)
    assert joined(chunks) == "one two th"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "ree fo"
    assert complete(stack, stop="ree fo")["choices"][0]["text"] == "one two th"
    kept = complete(stack, stop="ree fo", include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept == "one two three fo"
    wait_until(lambda: stack.manager.running == 0, "nothing running")


def test_a_stop_string_cancels_at_once(stack: Stack) -> None:
    stack.manager.script = says("one two three four " * 400)
    answer = complete(stack, stop="two", max_tokens=1500)
    assert answer["choices"][0]["text"] == "one "
    assert answer["usage"]["completion_tokens"] == 2
    wait_until(lambda: len(stack.manager.cancels) == 1, "the cancel")


def test_text_that_only_begins_like_a_stop_string_comes_out(stack: Stack) -> None:
    stack.manager.script = says("almost th")
    assert complete(stack, stop="three")["choices"][0]["text"] == "almost th"
    assert joined(stream(stack, stop="three")) == "almost th"


def test_min_tokens_holds_stop_strings_back(stack: Stack) -> None:
    stack.manager.script = says("a b a b a b a b")
    assert complete(stack, stop=" b", min_tokens=5)["choices"][0]["text"] == "a b a b a"


def test_a_stop_token_is_named_and_hidden(stack: Stack) -> None:
    (token,) = stack.model.tokenizer.encode(" two")
    text = stack.model.tokenizer.encode("one two")
    stack.manager.script = lambda submit, choice: text
    body = {"stop_token_ids": [token], "max_tokens": len(text)}
    choice = complete(stack, **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", token)
    assert complete(stack, **body, include_stop_str_in_output=True)["choices"][0]["text"] == "one two"


def test_n_choices_interleave_with_their_index(stack: Stack) -> None:
    texts = ["first text", "second, which is longer than that", "third"]
    stack.manager.script = says(*texts)
    chunks = stream(stack, "/v1/chat/completions", n=3)
    assert [joined(chunks, index) for index in range(3)] == texts
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
        {"role": "assistant", "content": ""}
    ] * 3
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in ends) == [0, 1, 2]
    assert [c["text"] for c in complete(stack, n=3)["choices"]] == texts


def test_a_stop_string_of_one_choice_leaves_the_others(stack: Stack) -> None:
    stack.manager.script = says("stop here please", "go on here please")
    texts = [c["text"] for c in complete(stack, n=2, stop="p here")["choices"]]
    assert texts == ["sto", "go on here please"]


def test_lists_of_prompts(stack: Stack) -> None:
    stack.manager.script = lambda submit, choice: list(submit.prompt_token_ids)
    ids = stack.model.tokenizer.encode("tokens")
    answer = complete(stack, prompt=["a text", ids], n=2)
    assert [c["text"] for c in answer["choices"]] == ["a text", "a text", "tokens", "tokens"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert complete(stack, prompt=ids)["choices"][0]["text"] == "tokens"
    assert joined(stream(stack, prompt=["a text", ids]), 1) == "tokens"


def test_best_of_keeps_the_likeliest(stack: Stack) -> None:
    stack.manager.script = says("bad", "good", "best")
    answer = complete(stack, n=2, best_of=3)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "best"), (1, "good")]
    assert answer["choices"][0]["logprobs"] is None


def test_echo(stack: Stack) -> None:
    stack.manager.script = says(" world")
    assert complete(stack, echo=True)["choices"][0]["text"] == "Hello world"
    assert joined(stream(stack, echo=True)) == "Hello world"


def test_scoring_a_prompt(stack: Stack) -> None:
    answer = complete(stack, prompt="Hello there world", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "Hello there world"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(choice["logprobs"]["tokens"]) == "Hello there world"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == [-1.0] * (len(choice["logprobs"]["tokens"]) - 1)
    assert choice["logprobs"]["text_offset"] == [0, 5, 11]
    assert stack.manager.submits[-1].read_cache is False


# --- log-probabilities ------------------------------------------------------------------------------------


def test_legacy_logprobs_and_their_stream(stack: Stack) -> None:
    whole = complete(stack, logprobs=2)["choices"][0]["logprobs"]
    assert len(whole["top_logprobs"][0]) == 2
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(stack, logprobs=2)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in part[key]] == whole[key]


def test_chat_logprobs_and_their_stream(stack: Stack) -> None:
    ask = {"messages": QUESTION, "logprobs": True, "top_logprobs": 3}
    whole = post(stack, "/v1/chat/completions", ask).json()["choices"][0]["logprobs"]["content"]
    assert len(whole[0]["top_logprobs"]) == 3
    data = b"".join(bytes(entry["bytes"]) for entry in whole[:-1])
    assert data.decode() == EMOJI
    parts = stream(stack, "/v1/chat/completions", logprobs=True, top_logprobs=3)
    entries = [c["logprobs"]["content"] for chunk in parts for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in entries for entry in part] == whole


def test_prompt_logprobs(stack: Stack) -> None:
    ids = stack.model.tokenizer.encode("Hello there")
    found = complete(stack, prompt="Hello there", prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert found[1][str(ids[1])] == {"logprob": -1.0, "rank": 1, "decoded_token": " there"}


def test_token_ids_on_request(stack: Stack) -> None:
    choice = complete(stack, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [*stack.model.tokenizer.encode(EMOJI), stack.model.eos_token_ids[0]]
    assert choice["prompt_token_ids"] == stack.model.tokenizer.encode("Hello")


# --- usage ------------------------------------------------------------------------------------------------


def test_usage_in_streams(stack: Stack) -> None:
    plain = stream(stack, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
    running = stream(stack, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts)
    assert (
        counts[-1] == plain[-1]["usage"]["completion_tokens"] == complete(stack)["usage"]["completion_tokens"]
    )
    assert plain[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# --- what reaches the manager -----------------------------------------------------------------------------


def test_every_field_arrives(stack: Stack) -> None:
    fields = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "min_tokens": 2, "ignore_eos": True, "seed": 42,
    }  # fmt: skip
    complete(
        stack, **fields, logit_bias={"5": -100}, stop_token_ids=[3], priority=-1, cache_salt="s", max_tokens=9
    )
    submit = stack.manager.submits[-1]
    for name, value in fields.items():
        assert getattr(submit.sampling, name) == value, name
    assert submit.sampling.logit_bias == {5: -100.0}
    assert (submit.sampling.stop_token_ids, submit.sampling.max_tokens) == ((3,), 9)
    assert (submit.priority, submit.cache_salt, submit.read_cache) == (-1, "s", True)


def test_defaults(stack: Stack) -> None:
    post(stack, "/v1/completions", {"prompt": "Hello"})
    post(stack, "/v1/chat/completions", {"messages": QUESTION})
    completion, chat = stack.manager.submits
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == stack.model.max_model_len - len(chat.prompt_token_ids)
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (1.0, 1.0, 0)
    assert completion.sampling.seed != chat.sampling.seed


def test_the_rest_of_chats_fields(stack: Stack) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Of course: "}]
    fields = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    ask = {
        "messages": messages,
        **fields,
        "max_completion_tokens": 50,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    answer = post(stack, "/v1/chat/completions", ask).json()
    submit = stack.manager.submits[-1]
    assert stack.model.tokenizer.decode(submit.prompt_token_ids).endswith("Of course: ")
    assert (submit.sampling.max_tokens, submit.sampling.prompt_logprobs) == (50, 0)
    assert answer["prompt_token_ids"] == list(submit.prompt_token_ids)
    assert len(answer["prompt_logprobs"]) == len(submit.prompt_token_ids)
    ids = answer["choices"][0]["token_ids"]
    assert ids == [*stack.model.tokenizer.encode(EMOJI), stack.model.eos_token_ids[0]]
    options = {"continuous_usage_stats": True}
    chunks = stream(stack, "/v1/chat/completions", return_token_ids=True, stream_options=options)
    assert [token for c in chunks[1:] for token in c["choices"][0].get("token_ids", [])] == ids
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)


def test_long_texts_are_tokenised_beside_the_loop(stack: Stack) -> None:
    words = "word " * 14_000
    body = {"messages": [{"role": "user", "content": words}]}
    count = post(stack, "/tokenize", {"prompt": words}).json()["count"]
    assert post(stack, "/tokenize", body).json()["count"] > count > 14_000
    assert (
        post(stack, "/v1/completions", {"prompt": words}).json()["error"]["code"] == "context_length_exceeded"
    )


def test_a_model_without_a_template_has_no_chat(stack: Stack) -> None:
    bare = dataclasses.replace(stack.model, chat_template=None)
    request = TokenizeRequest(messages=[ChatMessage("user", "x")])
    with pytest.raises(ApiError, match="no chat template"):
        asyncio.run(render_prompt(bare, request))


def test_chat_template_and_roles(stack: Stack) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "Bye"},
    ]
    assert post(stack, "/v1/chat/completions", {"messages": messages}).status_code == 200
    text = stack.model.tokenizer.decode(stack.manager.submits[-1].prompt_token_ids, skip_special_tokens=False)
    assert "system\nBe brief." in text
    assert "user\nHello\nthere" in text
    assert text.endswith("<|im_start|>assistant\n")


# --- tokenize ---------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(stack: Stack) -> None:
    answer = post(stack, "/tokenize", {"prompt": EMOJI, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == stack.model.max_model_len
    assert post(stack, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": EMOJI}
    chat = post(stack, "/tokenize", {"messages": QUESTION}).json()
    assert post(stack, "/detokenize", {"tokens": chat["tokens"]}).json()["prompt"].startswith("<|im_start|>")
    assert post(stack, "/tokenize", {}).status_code == 400
    assert post(stack, "/detokenize", {"tokens": [10**9]}).json()["error"]["param"] == "tokens"
