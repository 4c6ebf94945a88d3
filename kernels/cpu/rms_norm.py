"""rms_norm on CPUs (what it computes: kernels/reference/rms_norm.py): rows over threads."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import GOMP_PARALLEL, jit, over_rows, parallel, share_out
from kernels.cpu.memory import KINDS, Kind, elements, load, size_of, store
from kernels.cpu.workspace import WORKSPACE


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the normalised rows in x's dtype; `residual` is updated in place."""
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype)
    summed = x if residual is None else residual
    run(
        GOMP_PARALLEL,
        torch.get_num_threads(),
        WORKSPACE.address,
        KINDS[x.dtype],
        KINDS[weight.dtype],
        x.data_ptr(),
        summed.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        summed.stride(0),
        num_rows,
        hidden,
        eps,
    )
    return out


class Job(NamedTuple):
    """The arguments; tensors as addresses, strides in elements. `summed` is x itself without a residual."""

    kind: Kind
    weight_kind: Kind
    x: int
    summed: int
    weight: int
    out: int
    x_row: int
    summed_row: int
    num_rows: int
    hidden: int
    eps: float


@jit
def normalise(job: Job, row: int) -> None:
    """One row."""
    size = size_of(job.kind)
    x = elements(job.kind, job.x + row * job.x_row * size)
    summed = elements(job.kind, job.summed + row * job.summed_row * size)
    out = elements(job.kind, job.out + row * job.hidden * size)
    weight = elements(job.weight_kind, job.weight)
    if job.x != job.summed:
        for i in range(job.hidden):
            store(summed, i, load(summed, i) + load(x, i))
    squares = np.float32(0)
    for i in range(job.hidden):
        value = load(summed, i)
        squares += value * value
    scale = np.float32(1) / np.sqrt(squares / np.float32(job.hidden) + np.float32(job.eps))
    for i in range(job.hidden):
        store(out, i, load(summed, i) * scale * load(weight, i))


work = over_rows(normalise)


@jit
def run(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the rows out."""
    job = Job(*arguments)
    workers, items = share_out(counter, threads, job.num_rows, job.num_rows * job.hidden)
    parallel(gomp, workers, work, (job, counter, job.num_rows, items))
