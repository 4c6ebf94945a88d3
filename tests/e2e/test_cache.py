"""Prefix hits across requests, frontends and runners; blocks come back."""

import asyncio
import contextlib
import random

import httpx

from tests.e2e.server import Server, wait_until


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def cached(answer: dict) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_repeated_prompt_is_a_hit_with_the_same_text(served: Server) -> None:
    prompt = tokens(1, 100)
    cold, warm = (served.complete(prompt, max_tokens=20) for _ in range(2))
    assert (cached(cold), cached(warm)) == (0, 99)
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]


def test_generated_tokens_are_found_again(served: Server) -> None:
    prompt = tokens(2, 40)
    first = served.complete(prompt, max_tokens=40, ignore_eos=True, return_token_ids=True)
    whole = prompt + first["choices"][0]["token_ids"]
    # The last token drawn was never computed, so its KV is nowhere.
    assert cached(served.complete(whole, max_tokens=1)) == len(whole) - 1


def test_a_prefix_computed_on_one_runner_is_a_hit_on_the_other(served: Server) -> None:
    shared = tokens(3, 320)
    served.complete(shared, max_tokens=1)

    async def many() -> list[dict]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            bodies = [
                {
                    "model": served.model,
                    "prompt": shared + tokens(100 + i, 8),
                    "max_tokens": 16,
                    "temperature": 0,
                }
                for i in range(8)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    # Eight at once are spread over both runners by load, and only one of the two computed the prefix.
    assert [cached(answer) for answer in asyncio.run(many())] == [320] * 8


def test_another_salt_never_meets(served: Server) -> None:
    prompt = tokens(4, 64)
    served.complete(prompt, max_tokens=1, cache_salt="a")
    assert cached(served.complete(prompt, max_tokens=1, cache_salt="b")) == 0
    assert cached(served.complete(prompt, max_tokens=1, cache_salt="a")) == 63


def blocks_in_use(server: Server) -> float:
    return server.metrics()["pagekeeper_used_blocks"]


def test_a_client_that_goes_away_frees_its_blocks(served: Server) -> None:
    wait_until(lambda: blocks_in_use(served) == 0, "no block in use before")
    body = {"model": served.model, "prompt": tokens(5, 64), "max_tokens": 2000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # held: httpx closes the connection with its iterator
        next(lines)
        assert blocks_in_use(served) >= 4
    wait_until(lambda: blocks_in_use(served) == 0, "the streaming client's blocks back")
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=1.0))
    wait_until(lambda: blocks_in_use(served) == 0, "the waiting client's blocks back")


def test_a_seed_gives_the_same_text_alone_and_in_a_full_batch(served: Server) -> None:
    ask = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 1.0, "top_p": 0.95, "seed": 11}
    alone = served.text(**ask)

    async def crowd() -> str:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            others = [
                client.post(
                    "/v1/completions",
                    json={"model": served.model, "prompt": tokens(50 + i, 30 + 7 * i), "max_tokens": 40},
                )
                for i in range(20)
            ]
            mine = client.post("/v1/completions", json={"model": served.model, **ask})
            *_, answer = await asyncio.gather(*others, mine)
            text: str = answer.json()["choices"][0]["text"]
            return text

    assert asyncio.run(crowd()) == alone


def test_n_choices_share_the_prompt_and_differ(served: Server) -> None:
    answer = served.complete("My favourite animal is", max_tokens=16, n=4, temperature=1.0, seed=3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    first = served.text("My favourite animal is", max_tokens=16, temperature=1.0, seed=3)
    assert first == texts[0]
