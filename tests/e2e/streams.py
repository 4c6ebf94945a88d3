"""Streams beside which something is killed, stopped or restarted; each must end as if nothing had been."""

import threading
from typing import Any

from tests.e2e.server import Server, wait_until

PROMPT = "The history of the city begins"


class Streams:
    """`count` sampled streams, each with a seed and so a text of its own; use as a context manager.

    Their texts without any disturbance are computed first, one after the other.
    """

    def __init__(self, server: Server, count: int = 4, max_tokens: int = 120) -> None:
        self._server = server
        ask = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.9}
        self._asks: list[dict[str, Any]] = [{**ask, "seed": seed} for seed in range(count)]
        self._undisturbed = [server.text(**ask) for ask in self._asks]
        self._texts: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def _run(self, number: int) -> None:
        try:
            chunks: list[Any] = [*self._server.stream(**self._asks[number])]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            self._texts[number] = "".join(choice["text"] for choice in choices)
        except Exception as error:  # shown beside the text that should have come
            self._texts[number] = repr(error)

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.running >= 1, "a running request")
        return self

    @property
    def running(self) -> float:
        """Requests that a runner has now."""
        return self._server.metrics().get("vllm:num_requests_running", 0)

    def check(self) -> None:
        """Every stream ends, with the undisturbed text."""
        for thread in self._threads:
            thread.join(120)
        got = [self._texts.get(number, "no end") for number in range(len(self._asks))]
        wrong = [pair for pair in zip(got, self._undisturbed, strict=True) if pair[0] != pair[1]]
        assert not wrong, f"(got, undisturbed): {wrong}\n" + "\n".join(self._server.output[-60:])

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):
            self.check()
