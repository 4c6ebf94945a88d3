"""linear on CPUs: y = x · weightᵀ, the weight in panels of 32 outputs, the sums in registers.

    packed[panel, k, 0:32] = weight[32 · panel : 32 · panel + 32, k]    (the last one is filled with zeros)

    for each panel (over threads), for each 12 rows of x:
        sums[12][2 vectors of 16] += x[row, k] · packed[panel, k, :]      for all k

The weight is read in one stream and turned to float32 in registers; x is float32. So 16-bit weights cost
the memory of 16 bits and compute at float32's rate, with or without instructions for them. 12 rows are 24
sums: with 2 operands and a factor they fit AVX-512's 32 registers. A row's sums depend on no other row.
"""

from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from kernels.cpu.exponential import emit_math
from kernels.cpu.jit import (
    GOMP_PARALLEL,
    cgutils,
    jit,
    literal_intrinsic,
    literal_value,
    over_rows,
    parallel,
    share_out,
)
from kernels.cpu.memory import (
    BITS,
    FLOAT,
    KINDS,
    LANES,
    SIZES,
    Kind,
    emit_broadcast,
    emit_load,
    emit_store,
    lanes,
    size_of,
)
from kernels.cpu.workspace import WORKSPACE

INT64 = ir.IntType(64)
VECTOR = lanes(FLOAT, LANES)
VECTORS = 2
WIDTH = VECTORS * LANES  # outputs of a panel


def pack(weight: Tensor) -> Tensor:
    """`[outputs, inputs]` → `[panels, inputs, 32]`, in the same dtype."""
    outputs, inputs = weight.shape
    panels = -(-outputs // WIDTH)
    packed = weight.new_zeros((panels, inputs, WIDTH))
    whole = outputs // WIDTH
    packed[:whole] = weight[: whole * WIDTH].view(whole, WIDTH, inputs).transpose(1, 2)
    if whole < panels:
        packed[whole, :, : outputs - whole * WIDTH] = weight[whole * WIDTH :].T
    return packed


def linear(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """`[rows, inputs]` → `[rows, outputs]`, summed in float32 and rounded once to x's dtype."""
    num_rows, inputs = x.shape
    wide = x.float().contiguous()
    out = torch.empty((num_rows, packed.shape[0] * WIDTH), dtype=x.dtype)
    run(
        GOMP_PARALLEL,
        torch.get_num_threads(),
        WORKSPACE.address,
        KINDS[packed.dtype],
        KINDS[x.dtype],
        wide.data_ptr(),
        packed.data_ptr(),
        out.data_ptr(),
        num_rows,
        inputs,
        packed.shape[0],
    )
    return out if out.shape[1] == outputs else out[:, :outputs].contiguous()


class Job(NamedTuple):
    """The arguments; tensors as addresses."""

    kind: Kind
    out_kind: Kind
    x: int
    packed: int
    out: int
    num_rows: int
    inputs: int
    panels: int


@jit
def multiply(job: Job, panel: int) -> None:
    """All rows with one panel."""
    weight = job.packed + panel * job.inputs * WIDTH * size_of(job.kind)
    x_row, out_size = 4 * job.inputs, size_of(job.out_kind)
    out_row = job.panels * WIDTH * out_size
    x, out, left = job.x, job.out + panel * WIDTH * out_size, job.num_rows
    while left >= 12:
        panel_product(job.kind, job.out_kind, 12, x, x_row, weight, job.inputs, out, out_row)
        x, out, left = x + 12 * x_row, out + 12 * out_row, left - 12
    if left >= 8:
        panel_product(job.kind, job.out_kind, 8, x, x_row, weight, job.inputs, out, out_row)
        x, out, left = x + 8 * x_row, out + 8 * out_row, left - 8
    if left >= 4:
        panel_product(job.kind, job.out_kind, 4, x, x_row, weight, job.inputs, out, out_row)
        x, out, left = x + 4 * x_row, out + 4 * out_row, left - 4
    if left >= 2:
        panel_product(job.kind, job.out_kind, 2, x, x_row, weight, job.inputs, out, out_row)
        x, out, left = x + 2 * x_row, out + 2 * out_row, left - 2
    if left:
        panel_product(job.kind, job.out_kind, 1, x, x_row, weight, job.inputs, out, out_row)


work = over_rows(multiply)


@jit
def run(gomp: int, threads: int, counter: int, *arguments: Any) -> None:
    """Share the panels out."""
    job = Job(*arguments)
    workers, items = share_out(counter, threads, job.panels, job.panels * job.inputs * job.num_rows)
    parallel(gomp, workers, work, (job, counter, job.panels, items))


@literal_intrinsic
def panel_product(
    typing_context: Any,
    kind: Any,
    out_kind: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    depth: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[0:rows, 0:32] = x[0:rows, 0:depth] @ weight[0:depth, 0:32]; `rows` a literal, strides bytes."""
    num_rows = literal_value(rows)
    cells = [(row, vector) for row in range(num_rows) for vector in range(VECTORS)]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, x, x_stride, weight, depth, out, out_stride = arguments
        sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}
        for cell in cells:
            builder.store(ir.Constant(VECTOR, [0.0] * LANES), sums[cell])
        x_rows = [
            builder.inttoptr(builder.add(x, builder.mul(x_stride, INT64(row))), FLOAT.as_pointer())
            for row in range(num_rows)
        ]
        panel = builder.inttoptr(weight, BITS[kind].as_pointer())
        with cgutils.for_range(builder, depth) as loop:
            start = builder.mul(loop.index, INT64(WIDTH))
            operands = [
                emit_load(
                    builder, kind, builder.gep(panel, [builder.add(start, INT64(LANES * vector))]), LANES
                )
                for vector in range(VECTORS)
            ]
            for row in range(num_rows):
                factor = emit_broadcast(builder, builder.load(builder.gep(x_rows[row], [loop.index])))
                for vector in range(VECTORS):
                    total = sums[row, vector]
                    builder.store(
                        emit_math(builder, "fma", factor, operands[vector], builder.load(total)), total
                    )
        for row, vector in cells:
            place = builder.add(out, builder.mul(out_stride, INT64(row)))
            place = builder.add(place, INT64(LANES * vector * SIZES[out_kind]))
            pointer = builder.inttoptr(place, BITS[out_kind].as_pointer())
            emit_store(builder, out_kind, pointer, builder.load(sums[row, vector]), LANES)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(kind, out_kind, rows, int64, int64, int64, int64, int64, int64), codegen
