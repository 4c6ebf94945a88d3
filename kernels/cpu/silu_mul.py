"""silu_mul on CPUs (what it computes: kernels/reference/silu_mul.py): rows over threads."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.exponential import exp
from kernels.cpu.jit import GOMP_PARALLEL, jit, over_rows, parallel, share_out
from kernels.cpu.memory import KINDS, Kind, elements, load, size_of, store
from kernels.cpu.workspace import WORKSPACE


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, computed in float32 and rounded once."""
    num_rows, width = gate_up.shape
    out = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
    run(
        GOMP_PARALLEL,
        torch.get_num_threads(),
        WORKSPACE.address,
        KINDS[gate_up.dtype],
        gate_up.data_ptr(),
        out.data_ptr(),
        gate_up.stride(0),
        num_rows,
        width // 2,
    )
    return out


class Job(NamedTuple):
    """The arguments; tensors as addresses, strides in elements."""

    kind: Kind
    gate_up: int
    out: int
    gate_up_row: int
    num_rows: int
    width: int


@jit
def activate(job: Job, row: int) -> None:
    """One row."""
    size = size_of(job.kind)
    gate = elements(job.kind, job.gate_up + row * job.gate_up_row * size)
    up = elements(job.kind, job.gate_up + (row * job.gate_up_row + job.width) * size)
    out = elements(job.kind, job.out + row * job.width * size)
    for i in range(job.width):
        value = load(gate, i)
        store(out, i, value / (np.float32(1) + exp(-value)) * load(up, i))


work = over_rows(activate)


@jit
def run(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the rows out."""
    job = Job(*arguments)
    workers, items = share_out(counter, threads, job.num_rows, job.num_rows * job.width)
    parallel(gomp, workers, work, (job, counter, job.num_rows, items))
