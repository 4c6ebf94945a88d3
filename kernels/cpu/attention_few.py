"""Attention for pieces of few rows, as in decoding: keys and values are multiplied as they lie in the cache.

All keys of the piece are one tile. A thread takes the KV heads of its turn together: first the keys of one
head after the other, then all softmaxes, then the values. So it reads each head of each block in one go, in
an order that is written down beforehand (`list_spans`) and prefetched.
"""

import numpy as np

from kernels.cpu.attention_plan import (
    FEW_ROWS,
    PIECE_FIELDS,
    SPLIT,
    Job,
    Plan,
    Scratch,
    Seat,
    seat_of,
)
from kernels.cpu.attention_rows import finish, load_query, weigh
from kernels.cpu.columns import band_width, num_bands
from kernels.cpu.jit import jit
from kernels.cpu.memory import INT32, INT64, Kind, Pointer, elements, size_of
from kernels.cpu.spans import SPAN, dot_products, prefetch_span, weighted_sums
from kernels.cpu.tile import ROWS


@jit
def has_few(piece: Pointer) -> bool:
    """Whether the piece is computed here.

    The last rows of a sequence with too many rows to be split can be few, but have more keys than one tile.
    """
    return bool(piece[2] <= FEW_ROWS and piece[4] - piece[3] // SPAN * SPAN <= SPLIT)


@jit
def num_spans(piece: Pointer) -> int:
    """Spans that hold the piece's keys, rounded up to an even number: two make a vector of scores."""
    spans: int = (piece[4] + SPAN - 1) // SPAN - piece[3] // SPAN
    return spans + spans % 2


@jit
def list_spans(job: Job, piece: Pointer, first_head: int, heads: int, address: int) -> int:
    """Write the spans down in the order of the work: keys head by head, then each head's bands of values.

    Returns how many; 0 for a piece of many rows. The last span of an odd number comes twice.
    """
    if not has_few(piece):
        return 0
    spans, bands, size = num_spans(piece), num_bands(job.head_dim), size_of(job.cache_kind)
    values = address + heads * spans * 8
    list_first(job, piece, first_head, spans, address, values)
    for head in range(1, heads):
        shift(address, spans, head, head * job.key_head * size)
    for head in range(heads):
        column = 0
        for band in range(bands):
            shift(values, spans, head * bands + band, (head * job.value_head + column) * size)
            column += band_width(job.head_dim - column)
    return spans * heads * (1 + bands)


@jit
def list_first(job: Job, piece: Pointer, head: int, spans: int, key_list: int, value_list: int) -> None:
    """Write down the spans of the first head."""
    table = elements(INT32, job.block_tables + piece[0] * job.table_row * 4)
    keys, values = elements(INT64, key_list), elements(INT64, value_list)
    size = size_of(job.cache_kind)
    first, last = piece[3] // SPAN * SPAN, (piece[4] - 1) // SPAN * SPAN
    for span in range(spans):
        token = min(first + span * SPAN, last)
        logical = token // job.block_size
        block, slot = np.int64(table[logical]), token - logical * job.block_size
        key = block * job.key_block + slot * job.key_slot + head * job.key_head
        value = block * job.value_block + slot * job.value_slot + head * job.value_head
        keys[span] = job.key_cache + key * size
        values[span] = job.value_cache + value * size


@jit
def shift(address: int, spans: int, index: int, offset: int) -> None:
    """Write the first of some equally long lists down again as list `index`, moved by `offset` bytes."""
    first, other = elements(INT64, address), elements(INT64, address + index * spans * 8)
    for span in range(spans):
        other[span] = first[span] + offset


@jit
def attend_few(
    job: Job, plan: Plan, scratch: Scratch, index: int, first_head: int, heads: int, spans: int
) -> None:
    """A turn: piece `index` for some heads. `spans` is where its spans are written down."""
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    num_rows, first_key = piece[2], piece[3] // SPAN * SPAN
    row_spans = num_spans(piece) * 8
    for i in range(heads):
        seat = seat_of(job, scratch, i)
        load_query(job, seat, piece, first_head + i, num_rows)
        score(job, seat, num_rows, spans, row_spans)
        spans += row_spans
    size = size_of(job.cache_kind)
    value_step, value_size = job.value_slot * size, min(64, job.head_dim) * size
    for i in range(heads):
        seat = seat_of(job, scratch, i)
        for row in range(num_rows):
            # Weighing a row takes about as long as a span does to come from memory.
            upcoming = (i * num_rows + row) * 8
            if upcoming < heads * row_spans:
                prefetch_span(spans + upcoming, value_step, value_size)
            place = seat.scores + row * SPLIT * 4
            weigh(job, seat, piece, row, place, first_key, piece[4] - first_key)
    for i in range(heads):
        seat = seat_of(job, scratch, i)
        low, high = piece[3] - first_key, piece[4] - first_key
        column = 0
        while column < job.head_dim:
            accumulate(job, seat, num_rows, column, spans, low, high)
            column += band_width(job.head_dim - column)
            spans += row_spans
        finish(job, plan, seat, index, first_head + i)


@jit
def score(job: Job, seat: Seat, num_rows: int, spans: int, size: int) -> None:
    """scores = rows · keysᵀ; two spans at a time, for 4 rows at a time."""
    kind, dim, stride = job.cache_kind, job.head_dim, SPLIT * 4
    step = job.key_slot * size_of(kind)
    for offset in range(0, size, 16):
        for row in range(0, num_rows, ROWS):
            left, result = seat.query + row * dim * 4, seat.scores + row * stride + offset * SPAN // 2
            rows = min(ROWS, num_rows - row)
            if rows == 4:
                dot_products(kind, 4, left, spans + offset, step, dim, result, stride)
            elif rows == 3:
                dot_products(kind, 3, left, spans + offset, step, dim, result, stride)
            elif rows == 2:
                dot_products(kind, 2, left, spans + offset, step, dim, result, stride)
            else:
                dot_products(kind, 1, left, spans + offset, step, dim, result, stride)


@jit
def accumulate(job: Job, seat: Seat, num_rows: int, column: int, spans: int, low: int, high: int) -> None:
    """sums = weights · values for the band of values at `column`, 4 rows at a time."""
    kind = job.cache_kind
    for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        if rows == 4:
            add_band(job, kind, 4, seat, row, column, spans, low, high)
        elif rows == 3:
            add_band(job, kind, 3, seat, row, column, spans, low, high)
        elif rows == 2:
            add_band(job, kind, 2, seat, row, column, spans, low, high)
        else:
            add_band(job, kind, 1, seat, row, column, spans, low, high)


@jit
def add_band(
    job: Job, kind: Kind, rows: int, seat: Seat, row: int, column: int, spans: int, low: int, high: int
) -> None:
    """The same for `rows` rows, at most 4."""
    left, sums = seat.scores + row * SPLIT * 4, seat.sums + (row * job.head_dim + column) * 4
    step, stride, row_size = job.value_slot * size_of(kind), SPLIT * 4, job.head_dim * 4
    width = band_width(job.head_dim - column)
    if width == 64:
        weighted_sums(kind, rows, 4, left, stride, spans, step, low, high, sums, row_size)
    elif width == 32:
        weighted_sums(kind, rows, 2, left, stride, spans, step, low, high, sums, row_size)
    else:
        weighted_sums(kind, rows, 1, left, stride, spans, step, low, high, sums, row_size)
