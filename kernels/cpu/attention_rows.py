"""What attention does with the query rows of a piece, whichever way their keys and values are multiplied."""

from typing import Any

import numpy as np

from kernels.cpu.attention_plan import PIECE_FIELDS, Job, Plan, Seat, partial_size
from kernels.cpu.columns import give_row, take_row
from kernels.cpu.exponential import ONE, exp
from kernels.cpu.jit import jit, next_item
from kernels.cpu.memory import FLOAT32, INT32, INT64, LANES, Pointer, elements, size_of
from kernels.cpu.softmax import NEVER, ZERO, cap_scores, hide, online_softmax


@jit
def load_query(job: Job, seat: Seat, piece: Pointer, head: int, num_rows: int) -> None:
    """Copy the rows to scratch as scaled float32; up to `num_rows`, the last one again for padding."""
    starts = elements(INT32, job.query_start)
    maxima, weights = elements(FLOAT32, seat.maxima), elements(FLOAT32, seat.weights)
    sequence, first_row, last = piece[0], piece[1], piece[1] + piece[2] - 1
    scale = np.float32(job.scale)
    for index in range(num_rows):
        maxima[index] = NEVER
        weights[index] = ZERO
        row = min(first_row + index, last)
        token = row // job.group
        head_of_query = head * job.group + row - token * job.group
        start = (starts[sequence] + token) * job.query_token + head_of_query * job.query_head
        source, result = job.query + start * size_of(job.query_kind), seat.query + index * job.head_dim * 4
        take_row(job.cache_kind, job.query_kind, source, result, job.head_dim, scale)


@jit
def weigh(job: Job, seat: Seat, piece: Pointer, row: int, scores: int, first_key: int, count: int) -> Any:
    """scores (an address) of `count` keys → weights of the online softmax, 0 behind them to a whole vector.

    Returns the factor by which what the row has summed up so far must be scaled.
    """
    soft_cap: Any = np.float32(job.soft_cap)
    width = (count + LANES - 1) // LANES * LANES
    if soft_cap > ZERO:
        cap_scores(elements(FLOAT32, scores), width, soft_cap)
    last = position_of(job, piece[0], piece[1] + row) + 1 - first_key
    first = last - job.sliding_window if job.sliding_window > 0 else 0
    hide(elements(FLOAT32, scores), first, min(count, last), width)
    return online_softmax(scores, width // LANES, seat.maxima + row * 4, seat.weights + row * 4)


@jit
def position_of(job: Job, sequence: int, row: int) -> int:
    """The position in its sequence of a row's token."""
    starts, contexts = elements(INT32, job.query_start), elements(INT32, job.context_lens)
    query_length: int = starts[sequence + 1] - starts[sequence]
    context: int = contexts[sequence]
    return context - query_length + row // job.group


@jit
def finish(job: Job, plan: Plan, seat: Seat, index: int, head: int) -> None:
    """All keys of piece `index` are summed up: write the result, or this split's part of it."""
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    num_rows, split, splits = piece[2], piece[5], piece[6]
    if splits == 1:
        write_out(job, seat, piece, head)
        return
    size = partial_size(job, num_rows) * 4
    first = plan.partials + piece[7] * 4 + head * splits * size
    keep_partial(job, seat, num_rows, first + split * size)
    if next_item(plan.finished + ((index - split) * job.num_kv_heads + head) * 8) == splits - 1:
        merge(job, seat, num_rows, first, splits, size)
        write_out(job, seat, piece, head)


@jit
def write_out(job: Job, seat: Seat, piece: Pointer, head: int) -> None:
    """out = sums / sum of weights."""
    starts = elements(INT32, job.query_start)
    weights = elements(FLOAT32, seat.weights)
    sequence, first_row, num_rows = piece[0], piece[1], piece[2]
    for index in range(num_rows):
        row = first_row + index
        token = row // job.group
        head_of_query = head * job.group + row - token * job.group
        start = (starts[sequence] + token) * job.out_token + head_of_query * job.out_head
        sums, out = seat.sums + index * job.head_dim * 4, job.out + start * size_of(job.query_kind)
        give_row(job.cache_kind, job.query_kind, sums, out, job.head_dim, ONE / weights[index])


@jit
def keep_partial(job: Job, seat: Seat, num_rows: int, address: int) -> None:
    """Write one split's sums, maxima and sums of weights down."""
    kept, sums = elements(FLOAT32, address), elements(FLOAT32, seat.sums)
    maxima, weights = elements(FLOAT32, seat.maxima), elements(FLOAT32, seat.weights)
    place = num_rows * job.head_dim
    for i in range(place):
        kept[i] = sums[i]
    for row in range(num_rows):
        kept[place + row] = maxima[row]
        kept[place + num_rows + row] = weights[row]


@jit
def merge(job: Job, seat: Seat, num_rows: int, first: int, splits: int, size: int) -> None:
    """Sum up the partial results in the order of the splits, each rescaled to the common maximum."""
    sums = elements(FLOAT32, seat.sums)
    maxima, weights = elements(FLOAT32, seat.maxima), elements(FLOAT32, seat.weights)
    place = num_rows * job.head_dim
    for row in range(num_rows):
        best = NEVER
        for split in range(splits):
            maximum = elements(FLOAT32, first + split * size)[place + row]
            best = maximum if maximum > best else best
        maxima[row] = best
        weights[row] = ZERO
        for i in range(job.head_dim):
            sums[row * job.head_dim + i] = ZERO
        for split in range(splits):
            partial = elements(FLOAT32, first + split * size)
            factor = exp(partial[place + row] - best)
            weights[row] += factor * partial[place + num_rows + row]
            for i in range(job.head_dim):
                sums[row * job.head_dim + i] += factor * partial[row * job.head_dim + i]
