"""Beam search on the served model: as transformers has it, and the same in a batch with others, under
pressure and after a death.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.server import Server, wait_until
from tests.e2e.test_pressure import BLOCK_BYTES
from tests.gpu_runner.test_model_real import theirs as theirs  # a fixture

PROMPTS = ["The capital of France is", "Once upon a time there was a small dragon who"]
MAX_TOKENS = 12
BLOCK_SIZE = 16
SMALL_POOL = 20  # blocks: one search of three beams may need 16 of them, two need more than there are


def search(server: Server, prompt: object, width: int, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a beam search."""
    given = {"max_tokens": MAX_TOKENS, **fields}
    answer: Any = server.complete(prompt, use_beam_search=True, n=width, return_token_ids=True, **given)
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def expected(
    model: Any, prompt: list[int], width: int, eos: int, **fields: Any
) -> tuple[list[list[int]], list[float]]:
    """transformers' tokens, without what fills them up, and scores; best first."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
            return_dict_in_generate=True,
            output_scores=True,
            **fields,
        )
    rows = found.sequences[:, len(prompt) :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows], found.sequences_scores.tolist()


def tokenized(server: Server, text: str) -> list[int]:
    ids: list[int] = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def running(server: Server) -> dict[str, int]:
    """By request: how many tokens of its sequences are computed, as far as the manager knows."""
    requests: Any = httpx.get(f"{server.url}/kv/requests?state=running").json()["requests"]
    return {
        request["request_id"]: max(sequence["num_computed"] for sequence in request["sequences"])
        for request in requests
    }


def assert_it_went_on(request: dict[str, Any]) -> None:
    """A beam search whose beams had filled their first block: it was not begun anew, and of what it was given
    a block of tokens at most was not found, beside the last one, which nobody had computed.
    """
    assert request["attempt"] == 1
    lookup = request["lookup"]
    found = lookup["hit_blocks"] * BLOCK_SIZE + lookup["copied_tokens"]
    assert lookup["num_tokens"] > BLOCK_SIZE > request["num_prompt_tokens"]
    assert 0 <= lookup["num_tokens"] - 1 - found <= BLOCK_SIZE


def all_blocks_are_back(server: Server) -> None:
    def back() -> bool:
        metrics = server.metrics()
        unused = metrics["pagekeeper_free_blocks"] + metrics["pagekeeper_cached_blocks"]
        return unused == metrics["pagekeeper_blocks"]

    wait_until(back, "all blocks to be free or cached")


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty"), [(2, False, 1.0), (4, True, 0.6), (6, "never", 1.5)]
)
def test_texts_and_scores_are_those_of_transformers(
    served: Server, theirs: Any, width: int, early_stopping: Any, length_penalty: float
) -> None:
    """The end token is a frequent one, the full stop, so that beams end at different lengths."""
    (stop,) = tokenized(served, ".")
    for text in PROMPTS:
        prompt = tokenized(served, text)
        fields = {"early_stopping": early_stopping, "length_penalty": length_penalty}
        choices = search(served, prompt, width, ignore_eos=True, stop_token_ids=[stop], **fields)
        tokens, scores = expected(theirs, prompt, width, stop, **fields)
        assert [choice["token_ids"] for choice in choices] == tokens
        assert [choice["beam_score"] for choice in choices] == pytest.approx(scores, abs=1e-3)


def test_a_chat_gives_the_best_answers_first(served: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    answer = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={**body, "use_beam_search": True, "n": 2, "best_of": 4},
        timeout=60,
    ).json()
    scores = [choice["beam_score"] for choice in answer["choices"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert answer["choices"][0]["message"]["content"]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def assert_same_search(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The best text and all scores: in a batch, sums are rounded otherwise, so others may be near-ties."""
    assert found[0]["token_ids"] == wanted[0]["token_ids"]
    scores = [[choice["beam_score"] for choice in choices] for choices in (found, wanted)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_greedy_sampled_and_beam_requests_at_once_give_what_they_give_alone(served: Server) -> None:
    texts: list[Callable[[], Any]] = [
        lambda: served.text(PROMPTS[0], max_tokens=MAX_TOKENS, ignore_eos=True),
        lambda: served.text(PROMPTS[1], max_tokens=MAX_TOKENS, temperature=0.9, seed=5),
    ]
    searches: list[Callable[[], Any]] = [
        lambda: search(served, PROMPTS[0], 4),
        lambda: search(served, PROMPTS[1], 2, early_stopping=True, length_penalty=0.0, max_tokens=20),
    ]
    alone = [call() for call in texts + searches]
    together = at_once(texts + searches)
    assert together[:2] == alone[:2]
    for found, wanted in zip(together[2:], alone[2:], strict=True):
        assert_same_search(found, wanted)
    all_blocks_are_back(served)


def test_searches_and_choices_under_pressure_and_after_a_death_give_what_they_give_alone(
    served: Server,
) -> None:
    """Together in a pool too small for two of them; then with a runner that is killed in the middle."""
    prompts = [f"{number}. {text} and then, one day in May," for number, text in enumerate(PROMPTS * 2)]
    searches: list[Callable[[Server], Any]] = [
        partial(search, prompt=prompt, width=3, max_tokens=40, ignore_eos=True) for prompt in prompts
    ]

    def choices(server: Server) -> list[Any]:
        answer: Any = server.complete(
            prompts[0], n=3, max_tokens=40, temperature=0.8, min_p=0.05, seed=3, ignore_eos=True
        )
        return [choice["text"] for choice in answer["choices"]]

    alone = [call(served) for call in searches]
    texts = choices(served)
    with Server(pool_bytes=SMALL_POOL * BLOCK_BYTES, max_model_len=128) as server:
        *found, sampled = at_once([*(partial(call, server) for call in searches), partial(choices, server)])
        for each, wanted in zip(found, alone, strict=True):
            assert_same_search(each, wanted)
        assert sampled == texts
        assert server.metrics()["vllm:num_preemptions_total"] > 0
        all_blocks_are_back(server)
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(searches[0], server)]
            wait_until(lambda: bool(running(server)), "the search to run")
            (name,) = running(server)
            answers.append(pool.submit(choices, server))
            wait_until(lambda: running(server).get(name, 0) >= BLOCK_SIZE, "the beams to fill a block")
            os.kill(server.children("gpu_runner")[0], signal.SIGKILL)
            assert_same_search(answers[0].result(), alone[0])
            assert answers[1].result() == texts
        assert server.metrics()["pagekeeper_resubmitted_requests_total"] > 0
        all_blocks_are_back(server)
        assert_it_went_on(httpx.get(f"{server.url}/kv/requests/{name}").json()["request"])
