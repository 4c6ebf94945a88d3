"""Sharing to the token, and at once: what a prompt finds in the cache is copied or read, and never computed
twice, by nobody.
"""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.test_cache import cached, tokens


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def together(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Greedy completions, all sent at the same instant."""

    async def send() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=200) as client:
            same = {"model": server.model, "temperature": 0}
            calls = (client.post("/v1/completions", json={**same, **body}) for body in bodies)
            return [answer.json() for answer in await asyncio.gather(*calls)]

    return asyncio.run(send())


def computed_prompt_tokens(server: Server) -> float:
    """Since the manager's start, of all requests."""
    metrics = server.metrics()
    return metrics["vllm:prefix_cache_queries_total"] - metrics["vllm:prefix_cache_hits_total"]


@pytest.mark.parametrize("same", [47, 15, 1, 64])
def test_a_hit_goes_to_the_token_and_the_text_is_that_without_a_cache(served: Server, same: int) -> None:
    known = tokens(300 + same, 64)
    served.complete(known, max_tokens=1)
    prompt = known[:same] + tokens(400 + same, 20)
    cold = served.complete(prompt, max_tokens=24, cache_salt=f"nobody's {same}")
    warm = served.complete(prompt, max_tokens=24)
    assert (cached(cold), cached(warm)) == (0, same)
    assert text_of(cold) == text_of(warm)


def test_the_tail_of_a_prompt_that_was_served_is_a_hit(served: Server) -> None:
    prompt = tokens(310, 37)
    first = served.complete(prompt, max_tokens=24)
    again = served.complete(prompt, max_tokens=24)
    assert cached(again) == 36
    assert text_of(first) == text_of(again)


def test_salts_do_not_meet_below_a_full_block(served: Server) -> None:
    prompt = tokens(311, 15)
    served.complete(prompt, max_tokens=1, cache_salt="mine")
    assert cached(served.complete(prompt, max_tokens=1, cache_salt="yours")) == 0
    assert cached(served.complete(prompt, max_tokens=1, cache_salt="mine")) == 14


def test_32_prompts_at_once_compute_their_prefix_once(served: Server) -> None:
    prefix, before = tokens(320, 768), served.metrics()
    prompts = [prefix + tokens(330 + number, 8) for number in range(32)]
    computed = computed_prompt_tokens(served)
    answers = together(served, [{"prompt": prompt, "max_tokens": 8} for prompt in prompts])
    assert sorted(map(cached, answers)) == [0] + [768] * 31
    assert computed_prompt_tokens(served) - computed == 768 + 32 * 8
    waits = "pagekeeper_prefix_waits_total"
    assert served.metrics()[waits] - before[waits] == 31
    alone = served.complete(prompts[7], max_tokens=8, cache_salt="nobody's")
    assert text_of(alone) == text_of(answers[7])


def test_32_equal_prompts_at_once_are_computed_once(served: Server) -> None:
    prompt, computed = tokens(321, 384), computed_prompt_tokens(served)
    answers = together(served, [{"prompt": prompt, "max_tokens": 8}] * 32)
    assert computed_prompt_tokens(served) - computed == 384 + 31
    assert len({text_of(answer) for answer in answers}) == 1


def test_others_do_not_wait_for_a_producer_that_goes_away(served: Server) -> None:
    """The one that computes the prefix is given up by its client; the others have it computed anew."""
    prefix = tokens(322, 1024)

    async def send() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=served.url, timeout=200) as client:

            def call(number: int) -> Any:
                body = {"model": served.model, "temperature": 0, "max_tokens": 4}
                prompt = prefix + tokens(370 + number, 8)
                return client.post("/v1/completions", json={**body, "prompt": prompt})

            first = asyncio.create_task(call(0))
            await asyncio.wait([first], timeout=0.3)
            others = [asyncio.create_task(call(number)) for number in range(1, 5)]
            await asyncio.wait(others, timeout=0.1)
            first.cancel()
            return [answer.json() for answer in await asyncio.gather(*others)]

    answers = asyncio.run(send())
    # Whether the first had come far by then or not, only one of the others computed what was missing.
    assert sorted(map(cached, answers))[1:] == [1024] * 3
