"""Parity and speed of the Triton kernels on a CUDA GPU: `python -m tests.bench.gpu_kernels` (< 5 minutes).

Decode: bytes of keys and values per second, as a fraction of a large copy measured in the same run (0.80 is
wanted); prefill: TFLOP/s as a fraction of a large bfloat16 product (0.50 is wanted). Nothing is timed unless
parity holds. What is timed is the replay of a CUDA graph, as launching from Python takes longer than a small
decode; a small one is made on several inputs in turn, so that none finds its own in the GPU's cache.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Ops, load

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
PARITY_BOUND = 1e-2  # relative norm of a row, bfloat16
COLD = 256 << 20  # bytes of keys and values that no GPU's cache holds


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises SystemExit with a message for a value that is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="index of the CUDA device")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 16, 64, 256], help="sequences per decode"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens per sequence"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192], help="tokens per prefill")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls per case")
    parsed = parser.parse_args(arguments)
    for name in ("batches", "contexts", "prompts"):
        if min(getattr(parsed, name)) < 1:
            parser.error(f"--{name} are positive numbers, got {getattr(parsed, name)}")
    if parsed.repeats < 1:
        parser.error(f"--repeats is a positive number, got {parsed.repeats}")
    return parsed


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def make_inputs(queries: list[int], contexts: list[int], device: torch.device) -> tuple[Tensor, ...]:
    """Arguments of paged_attention over permuted blocks of random content."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32, device=device)
    place = 0
    for index, count in enumerate(counts):
        tables[index, :count] = order[place : place + count]
        place += count
    shape = (sum(counts), 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query = torch.randn(sum(queries), QUERY_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    starts = torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return query, pool[:, 0, 0], pool[:, 0, 1], tables, starts, lengths


def check_parity(ops: Ops, reference: Ops, device: torch.device) -> bool:
    """A decode, a mixed batch and a captured decode against the reference; prints one line each."""
    cases = {
        "split decode": ([1] * 8, [1, 15, 16, 17, 255, 1000, 4096, 9000]),
        "decode": ([1] * 300, [*range(1, 300), 5000]),
        "mixed": ([5, 0, 1, 300, 64], [5, 31, 4000, 1300, 64]),
    }
    fine = True
    for name, (queries, contexts) in cases.items():
        inputs = make_inputs(queries, contexts, device)
        expected = reference.paged_attention(*inputs, scale=SCALE).float().flatten(1)
        got = ops.paged_attention(*inputs, scale=SCALE).float().flatten(1)
        # Row by row: rows that see few keys are large, and would hide what is wrong with long ones.
        error = float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())
        fine &= error < PARITY_BOUND
        print(f"parity {name}: relative error {error:.1e} at most (bound {PARITY_BOUND:.0e})", flush=True)
    return fine & check_capture(ops, device)


def check_capture(ops: Ops, device: torch.device) -> bool:
    """A decode captured in a CUDA graph gives, replayed on other lengths, what a plain call gives."""
    inputs = make_inputs([1] * 4, [700, 30, 2000, 65], device)
    out = torch.empty_like(inputs[0])
    ops.paged_attention(*inputs, scale=SCALE, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention(*inputs, scale=SCALE, out=out)
    inputs[5].copy_(torch.tensor([699, 29, 1000, 17], dtype=torch.int32))
    graph.replay()
    same = torch.equal(out, ops.paged_attention(*inputs, scale=SCALE))
    print(f"CUDA graph: replay {'equals' if same else 'DIFFERS FROM'} a plain call")
    return same


def seconds_of_attention(
    ops: Ops, queries: list[int], contexts: list[int], device: torch.device, repeats: int
) -> float:
    """Median time of a call on inputs that are not in the GPU's cache."""
    size = sum(contexts) * 2 * KV_HEADS * HEAD_DIM * 2
    inputs = [make_inputs(queries, contexts, device) for _ in range(-(-COLD // size))]
    outs = [torch.empty_like(query) for query, *_ in inputs]

    def calls() -> None:
        for arguments, out in zip(inputs, outs, strict=True):
            ops.paged_attention(*arguments, scale=SCALE, out=out)

    calls()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return seconds(graph.replay, repeats) / len(inputs)


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: destination.copy_(source), repeats)


def product_rate(device: torch.device, repeats: int) -> float:
    """FLOP/s of an 8,192-cubed bfloat16 product."""
    size = 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds(lambda: left @ left, repeats)


def report_decode(ops: Ops, options: argparse.Namespace, device: torch.device) -> None:
    """One line per batch and context."""
    peak = copy_rate(device, options.repeats)
    print(f"copy: {peak / 1e9:.0f} GB/s")
    for batch in options.batches:
        for context in options.contexts:
            taken = seconds_of_attention(ops, [1] * batch, [context] * batch, device, options.repeats)
            rate = batch * context * 2 * KV_HEADS * HEAD_DIM * 2 / taken
            print(
                f"decode {batch} × {context}: {rate / 1e9:.0f} GB/s, {rate / peak:.2f} of copy (0.80 wanted)",
                flush=True,
            )


def report_prefill(ops: Ops, options: argparse.Namespace, device: torch.device) -> None:
    """One line per prompt length."""
    peak = product_rate(device, options.repeats)
    print(f"product: {peak / 1e12:.0f} TFLOP/s")
    for length in options.prompts:
        taken = seconds_of_attention(ops, [length], [length], device, options.repeats)
        rate = 4 * QUERY_HEADS * HEAD_DIM * length * (length + 1) / 2 / taken
        line = f"prefill {length}: {rate / 1e12:.0f} TFLOP/s, {rate / peak:.2f} of product (0.50 wanted)"
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """0 when parity holds, 1 when it does not, 2 without a GPU."""
    options = parse_arguments(arguments)
    if not torch.cuda.is_available() or options.device >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        print(f"no CUDA device {options.device}: {found} found; run this on a machine with one")
        return 2
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    print(torch.cuda.get_device_name(device))
    ops = load("triton")
    if not check_parity(ops, load("reference"), device):
        print("parity failed: no speed is reported")
        return 1
    report_decode(ops, options, device)
    report_prefill(ops, options, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
