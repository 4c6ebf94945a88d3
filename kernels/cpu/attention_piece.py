"""One work item of paged_attention: a piece of a sequence for one KV head, on one thread."""

from typing import Any

import numpy as np

from kernels.cpu.attention_plan import (
    LONG_TILE,
    PIECE_FIELDS,
    Job,
    Plan,
    Scratch,
    padded,
    partial_size,
    scratch_of,
)
from kernels.cpu.columns import PAIR, give_row, natural_column, take_row
from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit, next_item
from kernels.cpu.memory import FLOAT32, INT32, INT64, LANES, Kind, Pointer, elements, size_of
from kernels.cpu.softmax import NEVER, ONE, ZERO, cap_scores, hide, online_softmax
from kernels.cpu.tile import ROWS, TILE, add_product, dot_products, score_product, transpose, transpose_width

DIRECT_ROWS = 8  # up to this many rows, values are converted on the fly; beyond, once per tile into scratch


@jit
def work(job_and_plan: tuple[Job, Plan]) -> None:
    """One thread: take turns of items until none is left."""
    job, plan = job_and_plan
    scratch = scratch_of(job, plan.scratch + next_item(plan.next_thread) * plan.scratch_size)
    transposed, converted = elements(INT64, scratch.transposed_rows), elements(INT64, scratch.converted_rows)
    for i in range(job.head_dim):
        transposed[i] = scratch.keys + natural_column(job.cache_kind, i, job.head_dim) * TILE * 4
    for i in range(TILE):
        converted[i] = scratch.values + i * job.head_dim * 4
    num_items = plan.num_pieces * job.num_kv_heads
    rows, next_rows = scratch.rows, scratch.rows + 2 * LONG_TILE * 8
    first = next_item(plan.next_turn) * plan.turn_items
    if first < num_items:
        find_first_rows(job, plan, rows, first, 0)
    while first < num_items:
        upcoming = next_item(plan.next_turn) * plan.turn_items
        end = first + plan.turn_items
        for item in range(first, end):
            following = item + 1 if item + 1 < end else min(upcoming, num_items - 1)
            rows, next_rows = attend(job, plan, scratch, rows, next_rows, item, following)
        first = upcoming


@jit
def attend(
    job: Job, plan: Plan, scratch: Scratch, rows: int, next_rows: int, item: int, following: int
) -> tuple[int, int]:
    """One item: a piece for one KV head. `rows` is where the rows of its first tile are written down.

    While a tile is computed, the next one is brought nearer, at last the first one of the following item.
    Returns where the rows of that one are written down, and the other list.
    """
    index = item // job.num_kv_heads
    head = item - index * job.num_kv_heads
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    sequence, first_row, num_rows, low, high = piece[0], piece[1], piece[2], piece[3], piece[4]
    split, splits = piece[5], piece[6]
    load_query(job, scratch, sequence, head, first_row, num_rows)
    tile = tile_of(num_rows)
    for first_key in range(low, high, tile):
        count, next_key = min(tile, high - first_key), first_key + tile
        if next_key < high:
            find_rows(job, next_rows, sequence, head, next_key, min(tile, high - next_key), count)
        else:
            find_first_rows(job, plan, next_rows, following, count)
        score(job, scratch, rows, next_rows, num_rows, count)
        weigh(job, scratch, piece, first_key, count)
        accumulate(job, scratch, rows + LONG_TILE * 8, next_rows + LONG_TILE * 8, num_rows, count)
        rows, next_rows = next_rows, rows
    if splits == 1:
        write_out(job, scratch, piece, head)
        return rows, next_rows
    size = partial_size(job, num_rows) * 4
    first = plan.partials + piece[7] * 4 + head * splits * size
    keep_partial(job, scratch, num_rows, first + split * size)
    if next_item(plan.finished + ((index - split) * job.num_kv_heads + head) * 8) == splits - 1:
        merge(job, scratch, num_rows, first, splits, size)
        write_out(job, scratch, piece, head)
    return rows, next_rows


@jit
def tile_of(num_rows: int) -> int:
    """Keys of a tile; a row of scores in scratch is as long."""
    return LONG_TILE if num_rows <= ROWS else TILE


@jit
def find_first_rows(job: Job, plan: Plan, rows: int, item: int, at_least: int) -> None:
    """find_rows for the first tile of an item."""
    index = item // job.num_kv_heads
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    count = min(tile_of(piece[2]), piece[4] - piece[3])
    find_rows(job, rows, piece[0], item - index * job.num_kv_heads, piece[3], count, at_least)


@jit
def load_query(job: Job, scratch: Scratch, sequence: int, head: int, first_row: int, num_rows: int) -> None:
    """Copy the rows to scratch as scaled float32, the last one again for padding, and start their sums."""
    starts = elements(INT32, job.query_start)
    maxima, weights = elements(FLOAT32, scratch.maxima), elements(FLOAT32, scratch.weights)
    sums = elements(FLOAT32, scratch.sums)
    size = size_of(job.query_kind)
    scale = np.float32(job.scale)
    for row in range(padded(num_rows)):
        maxima[row] = NEVER
        weights[row] = ZERO
        place = row * job.head_dim
        for i in range(job.head_dim):
            sums[place + i] = ZERO
        token = (first_row + min(row, num_rows - 1)) // job.group
        head_in_group = first_row + min(row, num_rows - 1) - token * job.group
        start = (starts[sequence] + token) * job.query_token + (
            head * job.group + head_in_group
        ) * job.query_head
        source, result = job.query + start * size, scratch.query + place * 4
        take_row(job.cache_kind, job.query_kind, source, result, job.head_dim, scale)


@jit
def position_of(job: Job, sequence: int, row: int) -> int:
    """The position in its sequence of a row's token."""
    starts, contexts = elements(INT32, job.query_start), elements(INT32, job.context_lens)
    query_length: int = starts[sequence + 1] - starts[sequence]
    context: int = contexts[sequence]
    return context - query_length + row // job.group


@jit
def find_rows(
    job: Job, rows: int, sequence: int, head: int, first_key: int, count: int, at_least: int
) -> None:
    """Write down where `count` keys from `first_key` on lie, and their values.

    Behind them the last one is repeated, up to `at_least` and to whole vectors: no unused slot is ever read.
    """
    table = elements(INT32, job.block_tables + sequence * job.table_row * 4)
    keys, values = elements(INT64, rows), elements(INT64, rows + LONG_TILE * 8)
    size = size_of(job.cache_kind)
    key_step, value_step = job.key_slot * size, job.value_slot * size
    index = 0
    while index < count:
        logical = (first_key + index) // job.block_size
        offset = first_key + index - logical * job.block_size
        block = np.int64(table[logical])
        key = job.key_cache + (block * job.key_block + head * job.key_head + offset * job.key_slot) * size
        value = (
            job.value_cache
            + (block * job.value_block + head * job.value_head + offset * job.value_slot) * size
        )
        run_length = min(job.block_size - offset, count - index)
        for i in range(run_length):
            keys[index + i] = key + i * key_step
        for i in range(run_length):
            values[index + i] = value + i * value_step
        index += run_length
    for i in range(count, max(whole(count), at_least)):
        keys[i] = keys[count - 1]
        values[i] = values[count - 1]


@jit
def whole(count: int) -> int:
    """Keys rounded up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


@jit
def score(job: Job, scratch: Scratch, rows: int, next_rows: int, num_rows: int, count: int) -> None:
    """scores = rows · keysᵀ for the tile."""
    if num_rows <= ROWS:
        score_few(job, scratch, rows, next_rows, num_rows, count)
        return
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
        left, result = scratch.query + row * row_size, scratch.scores + row * TILE * 4
        score_product(left, row_size, scratch.transposed_rows, job.head_dim, result)


@jit
def score_few(job: Job, scratch: Scratch, rows: int, next_rows: int, num_rows: int, count: int) -> None:
    """The same for at most 4 rows, which do not pay for transposing the keys."""
    kind, dim = job.cache_kind, job.head_dim
    for group in range(0, count, LANES):
        keys, next_keys = rows + group * 8, next_rows + group * 8
        result, stride = scratch.scores + group * 4, LONG_TILE * 4
        if num_rows == 4:
            dot_products(kind, 4, scratch.query, keys, next_keys, dim, result, stride)
        elif num_rows == 3:
            dot_products(kind, 3, scratch.query, keys, next_keys, dim, result, stride)
        elif num_rows == 2:
            dot_products(kind, 2, scratch.query, keys, next_keys, dim, result, stride)
        else:
            dot_products(kind, 1, scratch.query, keys, next_keys, dim, result, stride)


@jit
def weigh(job: Job, scratch: Scratch, piece: Pointer, first_key: int, count: int) -> None:
    """scores → weights of the online softmax; what the rows have summed up is rescaled."""
    soft_cap: Any = np.float32(job.soft_cap)
    sequence, first_row, num_rows = piece[0], piece[1], piece[2]
    width, row_size = whole(count), tile_of(num_rows) * 4
    for row in range(num_rows):
        place = scratch.scores + row * row_size
        scores = elements(FLOAT32, place)
        if soft_cap > ZERO:
            cap_scores(scores, width, soft_cap)
        last = position_of(job, sequence, first_row + row) + 1 - first_key
        first = last - job.sliding_window if job.sliding_window > 0 else 0
        hide(scores, first, min(count, last), width)
        factor = online_softmax(place, width // LANES, scratch.maxima + row * 4, scratch.weights + row * 4)
        if factor != ONE:
            sums = elements(FLOAT32, scratch.sums + row * job.head_dim * 4)
            for i in range(job.head_dim):
                sums[i] *= factor


@jit
def accumulate(job: Job, scratch: Scratch, rows: int, next_rows: int, num_rows: int, count: int) -> None:
    """sums += weights · values for the tile, 4 rows by 64 columns (16 at the end) at a time."""
    if num_rows <= DIRECT_ROWS:
        for row in range(0, num_rows, ROWS):
            add_few(job, scratch, rows, next_rows, row, num_rows - row, count)
        return
    values = elements(INT64, rows)
    for i in range(count):
        converted = scratch.values + i * job.head_dim * 4
        take_row(job.cache_kind, job.cache_kind, values[i], converted, job.head_dim, ONE)
    row_size = job.head_dim * 4
    for row in range(0, num_rows, ROWS):
        left, sums = scratch.scores + row * TILE * 4, scratch.sums + row * row_size
        add_columns(job, FLOAT32, 4, 0, left, TILE * 4, scratch.converted_rows, next_rows, count, sums)


@jit
def add_few(
    job: Job, scratch: Scratch, rows: int, next_rows: int, row: int, num_rows: int, count: int
) -> None:
    """The same for few rows: values as they lie in the cache."""
    stride = tile_of(row + num_rows) * 4
    left, sums = scratch.scores + row * stride, scratch.sums + row * job.head_dim * 4
    if num_rows >= 4:
        add_columns(job, job.cache_kind, 4, 1, left, stride, rows, next_rows, count, sums)
    elif num_rows == 3:
        add_columns(job, job.cache_kind, 3, 1, left, stride, rows, next_rows, count, sums)
    elif num_rows == 2:
        add_columns(job, job.cache_kind, 2, 1, left, stride, rows, next_rows, count, sums)
    else:
        add_columns(job, job.cache_kind, 1, 1, left, stride, rows, next_rows, count, sums)


@jit
def add_columns(
    job: Job,
    kind: Kind,
    num_rows: int,
    ahead: int,
    left: int,
    stride: int,
    rows: int,
    next_rows: int,
    depth: int,
    sums: int,
) -> None:
    """sums += left · rows for `num_rows` rows, at most 4."""
    row_size = job.head_dim * 4
    wide, paired = job.head_dim // 64 * 64, job.head_dim // PAIR * PAIR
    size = size_of(kind)
    for column in range(0, wide, 64):
        place, offset = sums + column * 4, column * size
        add_product(kind, num_rows, 4, ahead, left, stride, rows, offset, next_rows, depth, place, row_size)
    for column in range(wide, paired, PAIR):
        place, offset = sums + column * 4, column * size
        add_product(kind, num_rows, 2, ahead, left, stride, rows, offset, next_rows, depth, place, row_size)
    for column in range(paired, job.head_dim, LANES):
        place, offset = sums + column * 4, column * size
        add_product(kind, num_rows, 1, ahead, left, stride, rows, offset, next_rows, depth, place, row_size)


@jit
def write_out(job: Job, scratch: Scratch, piece: Pointer, head: int) -> None:
    """out = sums / sum of weights."""
    starts = elements(INT32, job.query_start)
    weights = elements(FLOAT32, scratch.weights)
    sequence, first_row, num_rows = piece[0], piece[1], piece[2]
    for row in range(num_rows):
        token = (first_row + row) // job.group
        head_in_group = first_row + row - token * job.group
        start = (starts[sequence] + token) * job.out_token + (head * job.group + head_in_group) * job.out_head
        sums, out = scratch.sums + row * job.head_dim * 4, job.out + start * size_of(job.query_kind)
        give_row(job.cache_kind, job.query_kind, sums, out, job.head_dim, ONE / weights[row])


@jit
def keep_partial(job: Job, scratch: Scratch, num_rows: int, address: int) -> None:
    """Write one split's sums, maxima and sums of weights down."""
    kept, sums = elements(FLOAT32, address), elements(FLOAT32, scratch.sums)
    maxima, weights = elements(FLOAT32, scratch.maxima), elements(FLOAT32, scratch.weights)
    place = num_rows * job.head_dim
    for i in range(place):
        kept[i] = sums[i]
    for row in range(num_rows):
        kept[place + row] = maxima[row]
        kept[place + num_rows + row] = weights[row]


@jit
def merge(job: Job, scratch: Scratch, num_rows: int, first: int, splits: int, size: int) -> None:
    """Sum up the partial results in the order of the splits, each rescaled to the common maximum."""
    sums = elements(FLOAT32, scratch.sums)
    maxima, weights = elements(FLOAT32, scratch.maxima), elements(FLOAT32, scratch.weights)
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
