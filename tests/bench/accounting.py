"""What paging and sharing save, counted on the real manager core and a real runner's scheduler: no model, no
clock, the same figures on every machine.

    python -m tests.bench.accounting

Memory is that of the paper's first example: 16,384 slots, in blocks of 16. Figures are means over the steps
at which it is full. What sharing saves is counted with memory for 32 requests, so that none is preempted.
"""

from collections.abc import Sequence
from typing import Final

from kvmanager.protocol import BeamParams, SamplingParams
from tests.bench.accounting_host import BLOCK_SIZE, VOCABULARY, Host, Usage
from tests.bench.accounting_reserve import RESERVES, simulate
from tests.bench.workloads import Ask, Workload, log_normal

NUM_BLOCKS: Final = 1024
REQUESTS: Final = 512
AT_ONCE: Final = 32  # requests, where sharing is counted
WIDTHS: Final = (2, 4, 6)
MEANS: Final = ((160, 140), (19, 58), (161, 338))
"""Tokens in and out: of the mix, and of the paper's two traces, Alpaca and ShareGPT."""
MAX_STEPS: Final = 100_000


def run(host: Host, asks: Sequence[Ask], width: int = 1, beam: bool = False) -> Usage:
    """All of them at once, to their end; `width` choices each, sampled or by beam search."""
    for number, ask in enumerate(asks):
        params = BeamParams(width) if beam else None
        sampling = SamplingParams(ask.output_tokens, number, ignore_eos=True, beam=params)
        host.submit(number, ask.prompt, width, sampling)
    for _ in range(MAX_STEPS):
        if host.idle:
            return host.usage
        host.step()
    raise AssertionError(f"not done after {MAX_STEPS} steps: {host.scheduler.statistics()}")


def paging(asks: Sequence[Ask]) -> list[tuple[str, Usage]]:
    """What each way to hold memory gives for the same requests in the same memory."""
    rows = [
        (f"{name}, reserved", simulate(asks, NUM_BLOCKS * BLOCK_SIZE, reserve))
        for name, reserve in RESERVES.items()
    ]
    host = Host(NUM_BLOCKS, max_num_seqs=len(asks))
    return [*rows, ("blocks as they fill, credits included", run(host, asks))]


def paging_table(rows: Sequence[tuple[str, Usage]]) -> str:
    """Markdown."""
    lines = ["| a request holds | slots without a token | requests at once |", "|---|---|---|"]
    lines += [f"| {name} | {usage.waste:.1%} | {usage.at_once:.1f} |" for name, usage in rows]
    return "\n".join(lines)


def saving(asks: Sequence[Ask], width: int, beam: bool) -> float:
    """Share of the blocks that sharing saves."""
    longest = max(len(ask.prompt) + ask.output_tokens for ask in asks)
    host = Host(AT_ONCE * width * (longest // BLOCK_SIZE + 2), AT_ONCE * width)
    usage = run(host, asks, width, beam)
    assert host.core.state.counters.preemptions == 0
    return usage.saving


def sharing_row(workload: Workload) -> str:
    """Markdown: for each width what sampling saves, then what beams save."""
    cells = [f"{saving(workload.asks, width, beam):.1%}" for beam in (False, True) for width in WIDTHS]
    return f"| {workload.name} | {' | '.join(cells)} |"


def main() -> None:
    print(paging_table(paging(log_normal(VOCABULARY, REQUESTS).asks)), "\n")
    heads = [f"{kind} {width}" for kind in ("n", "beams") for width in WIDTHS]
    print(f"| blocks saved by sharing | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
    for means in MEANS:
        print(sharing_row(log_normal(VOCABULARY, 2 * AT_ONCE, means)))


if __name__ == "__main__":
    main()
