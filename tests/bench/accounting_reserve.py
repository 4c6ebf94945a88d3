"""What servers without paging do: each request takes one stretch of slots for all that it may need, from its
start to its end. The paper's three variants of Orca, without the fragmentation between stretches.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.bench.accounting_host import MAX_MODEL_LEN, Usage
from tests.bench.workloads import Ask

Reserve = Callable[[Ask], int]
"""Slots for a request."""


def _final(ask: Ask) -> int:
    """Tokens whose KV is ever stored: the last one drawn never is."""
    return len(ask.prompt) + ask.output_tokens - 1


RESERVES: Final[Mapping[str, Reserve]] = {
    "the maximum length": lambda ask: MAX_MODEL_LEN,
    "the next power of two": lambda ask: len(ask.prompt) + (1 << (ask.output_tokens - 1).bit_length()),
    "the exact final length": _final,
}


def simulate(asks: Sequence[Ask], num_slots: int, reserve: Reserve) -> Usage:
    """All asks at once, first come first served; a step computes a prompt or one token of each that runs."""
    usage = Usage()
    waiting, running = deque(asks), list[list[int]]()  # of each: reserved, tokens, final tokens
    while waiting:
        held = sum(reserved for reserved, *_ in running)
        while waiting and held + reserve(waiting[0]) <= num_slots:
            ask = waiting.popleft()
            running.append([reserve(ask), len(ask.prompt), _final(ask)])
            held += reserve(ask)
        if waiting and len(waiting) + len(running) < len(asks):
            usage.steps += 1
            usage.requests += len(running)
            usage.held += held
            usage.filled += sum(tokens for _, tokens, _ in running)
        running = [[reserved, tokens + 1, final] for reserved, tokens, final in running if tokens < final]
    return usage
