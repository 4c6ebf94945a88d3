"""Attention for pieces of many rows, as in prefill: a tile of keys is transposed once for all of them.

Keys go by in tiles of 64: scores = rows · keysᵀ, online softmax, sums = sums · rescale + weights · values.
"""

import numpy as np

from kernels.cpu.attention_plan import PIECE_FIELDS, Job, Plan, Scratch, Seat, padded, seat_of
from kernels.cpu.attention_rows import finish, load_query, weigh
from kernels.cpu.columns import natural_column, take_row
from kernels.cpu.exponential import ONE
from kernels.cpu.jit import jit
from kernels.cpu.memory import FLOAT32, INT32, INT64, LANES, Pointer, elements, size_of
from kernels.cpu.softmax import ZERO
from kernels.cpu.tile import ROWS, TILE, add_product, score_product, transpose, transpose_width


@jit
def list_scratch_rows(job: Job, scratch: Scratch) -> None:
    """Write down where the rows of transposed keys and converted values lie; that stays for the whole job."""
    transposed, converted = elements(INT64, scratch.transposed_rows), elements(INT64, scratch.converted_rows)
    for i in range(job.head_dim):
        transposed[i] = scratch.keys + natural_column(job.cache_kind, i, job.head_dim) * TILE * 4
    for i in range(TILE):
        converted[i] = scratch.values + i * job.head_dim * 4


@jit
def attend_many(job: Job, plan: Plan, scratch: Scratch, index: int, head: int) -> None:
    """Piece `index` for one KV head. While a tile is computed, the next one is prefetched."""
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    num_rows, low, high = piece[2], piece[3], piece[4]
    seat = seat_of(job, scratch, 0)
    load_query(job, seat, piece, head, padded(num_rows))
    sums = elements(FLOAT32, seat.sums)
    for i in range(padded(num_rows) * job.head_dim):
        sums[i] = ZERO
    rows, next_rows = scratch.rows, scratch.rows + 2 * TILE * 8
    find_rows(job, rows, piece, head, low)
    for first_key in range(low, high, TILE):
        count, next_key = min(TILE, high - first_key), first_key + TILE
        find_rows(job, next_rows, piece, head, next_key if next_key < high else first_key)
        score(job, scratch, seat, rows, next_rows, num_rows, count)
        for row in range(num_rows):
            place = seat.scores + row * TILE * 4
            factor = weigh(job, seat, piece, row, place, first_key, count)
            if factor != ONE:
                scale(job, seat.sums + row * job.head_dim * 4, factor)
        accumulate(job, scratch, seat, rows + TILE * 8, num_rows, count)
        rows, next_rows = next_rows, rows
    finish(job, plan, seat, index, head)


@jit
def find_rows(job: Job, rows: int, piece: Pointer, head: int, first_key: int) -> None:
    """Write down where the keys of a tile lie, and their values.

    Behind the piece's last key that one is repeated: no unused slot is ever read.
    """
    table = elements(INT32, job.block_tables + piece[0] * job.table_row * 4)
    keys, values = elements(INT64, rows), elements(INT64, rows + TILE * 8)
    size, count = size_of(job.cache_kind), min(TILE, piece[4] - first_key)
    key_step, value_step = job.key_slot * size, job.value_slot * size
    index = 0
    while index < count:
        logical = (first_key + index) // job.block_size
        slot = first_key + index - logical * job.block_size
        block = np.int64(table[logical])
        key = job.key_cache + (block * job.key_block + head * job.key_head + slot * job.key_slot) * size
        place = block * job.value_block + head * job.value_head + slot * job.value_slot
        value = job.value_cache + place * size
        run_length = min(job.block_size - slot, count - index)
        for i in range(run_length):
            keys[index + i] = key + i * key_step
        for i in range(run_length):
            values[index + i] = value + i * value_step
        index += run_length
    for i in range(count, TILE):
        keys[i] = keys[count - 1]
        values[i] = values[count - 1]


@jit
def score(
    job: Job, scratch: Scratch, seat: Seat, rows: int, next_rows: int, num_rows: int, count: int
) -> None:
    """scores = rows · keysᵀ for the tile."""
    kind = job.cache_kind
    size, width = size_of(kind), transpose_width(kind)
    wide = job.head_dim // width * width
    for group in range(0, count, LANES):
        key_rows, next_key_rows = rows + group * 8, next_rows + group * 8
        for column in range(0, wide, width):
            place = scratch.keys + (column * TILE + group) * 4
            transpose(kind, 1, key_rows, column * size, place, next_key_rows)
        for column in range(wide, job.head_dim, LANES):
            place = scratch.keys + (column * TILE + group) * 4
            transpose(kind, 0, key_rows, column * size, place, next_key_rows)
    row_size = job.head_dim * 4
    for row in range(0, num_rows, ROWS):
        left, result = seat.query + row * row_size, seat.scores + row * TILE * 4
        score_product(left, row_size, scratch.transposed_rows, job.head_dim, result)


@jit
def scale(job: Job, address: int, factor: float) -> None:
    """Rescale what a row has summed up."""
    sums = elements(FLOAT32, address)
    for i in range(job.head_dim):
        sums[i] *= factor


@jit
def accumulate(job: Job, scratch: Scratch, seat: Seat, values: int, num_rows: int, count: int) -> None:
    """sums += weights · values for the tile, 4 rows by 64 columns (32 and 16 at the end) at a time."""
    rows = elements(INT64, values)
    for i in range(count):
        converted = scratch.values + i * job.head_dim * 4
        take_row(job.cache_kind, job.cache_kind, rows[i], converted, job.head_dim, ONE)
    row_size, stride, right = job.head_dim * 4, TILE * 4, scratch.converted_rows
    wide, paired = job.head_dim // 64 * 64, job.head_dim // 32 * 32
    for row in range(0, num_rows, ROWS):
        left, sums = seat.scores + row * stride, seat.sums + row * row_size
        for place in range(0, wide * 4, 256):
            add_product(4, left, stride, right, place, count, sums + place, row_size)
        for place in range(wide * 4, paired * 4, 128):
            add_product(2, left, stride, right, place, count, sums + place, row_size)
        for place in range(paired * 4, row_size, 64):
            add_product(1, left, stride, right, place, count, sums + place, row_size)
