"""paged_attention on CPUs (what it computes: kernels/reference/paged_attention.py).

Rows: the query rows of one sequence that share a KV head, token-major: row = token · group + head in group. A decode
step of a 9-on-3 model has 3 rows, a prefill chunk of 512 tokens has 1,536.

Work item: (piece, KV head); a piece is up to 96 rows of one sequence and a range of its keys. A sequence whose rows fit
into one piece (decode, short chunks) is split at every 256th key and merged by whichever thread finishes last. Where
it is split depends on the sequence alone, never on the batch or the number of threads: a sequence gets the same bits
alone and in a full batch.

Per item, keys go by in tiles of 64: keys transposed to float32 scratch, scores = rows · keysᵀ, online softmax,
out = out · rescale + scores · values, values read where they lie. All scratch of an item stays in the second-level cache.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.exponential import exp
from kernels.cpu.jit import GOMP_PARALLEL, jit, next_item, parallel, reset
from kernels.cpu.memory import FLOAT32, INT32, INT64, KINDS, elements, load, size_of, store
from kernels.cpu.softmax import NEVER, ONE, ZERO, cap_scores, hide_scores, online_softmax
from kernels.cpu.tile import ROWS, tile_product, transpose
from kernels.cpu.workspace import WORKSPACE

MAX_ROWS = 96  # rows of a piece: enough to pay for transposing the keys once per piece
TILE = 64  # keys of a tile: 4 vectors of scores
SPLIT = 256  # keys of a piece of a split sequence
DIRECT_ROWS = 8  # up to this many rows, values are converted on the fly; beyond, once per tile into scratch
LINE = 64  # bytes of a cache line


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return `out`, shaped as `query`; rows that belong to no sequence are left as they were."""
    if out is None:
        out = torch.empty_like(query)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    arguments = (
        GOMP_PARALLEL,
        torch.get_num_threads(),
        KINDS[query.dtype],
        KINDS[key_cache.dtype],
        query.data_ptr(),
        out.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        len(context_lens),
        query.shape[1] // num_kv_heads,
        num_kv_heads,
        block_size,
        head_dim,
        *query.stride()[:2],
        *out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        scale,
        sliding_window,
        soft_cap,
    )
    while (needed := run(WORKSPACE.address, WORKSPACE.size, *arguments)) > WORKSPACE.size:
        WORKSPACE.grow(needed)
    return out


class Job(NamedTuple):
    """The arguments: tensors as addresses, strides in elements."""

    query_kind: object
    cache_kind: object
    query: int
    out: int
    key_cache: int
    value_cache: int
    block_tables: int
    query_start: int
    context_lens: int
    num_seqs: int
    group: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    query_token: int
    query_head: int
    out_token: int
    out_head: int
    key_block: int
    key_head: int
    key_slot: int
    value_block: int
    value_head: int
    value_slot: int
    table_row: int
    scale: float
    sliding_window: int
    soft_cap: float


class Plan(NamedTuple):
    """Where the parts of the workspace lie (addresses), and how many pieces there are."""

    num_pieces: int
    next_item: int  # int64 counter of items taken
    next_thread: int  # int64 counter of threads that came
    pieces: int  # PIECE_FIELDS × int64 each
    finished: int  # int64 per piece and KV head: splits of that sequence that are done
    partials: int
    scratch: int
    scratch_size: int
    end: int


PIECE_FIELDS = 8  # sequence, first row, rows, first key, end of keys, split, splits, place of the partial results


@jit
def run(workspace, workspace_size, gomp, threads, *arguments):
    """Do the job; or, where the workspace is too small, nothing. Returns the bytes of workspace that it takes."""
    job = Job(*arguments)
    num_pieces, partial_floats = write_pieces(job, INT64, False)
    plan = lay_out(job, workspace, num_pieces, partial_floats, threads)
    needed = plan.end - workspace
    if needed > workspace_size:
        return needed
    write_pieces(job, plan.pieces, True)
    reset(plan.next_item)
    reset(plan.next_thread)
    for i in range(num_pieces * job.num_kv_heads):
        reset(plan.finished + i * 8)
    parallel(gomp, min(threads, num_pieces * job.num_kv_heads), work, (job, plan))
    return needed


@jit
def lines(size):
    """Bytes rounded up to whole cache lines."""
    return (size + LINE - 1) // LINE * LINE


@jit
def lay_out(job, workspace, num_pieces, partial_floats, threads):
    """Place the parts one after the other."""
    pieces = workspace + 2 * LINE
    finished = pieces + lines(num_pieces * PIECE_FIELDS * 8)
    partials = finished + lines(num_pieces * job.num_kv_heads * 8)
    scratch = partials + lines(partial_floats * 4)
    scratch_size = scratch_of(job, 0).end
    end = scratch + threads * scratch_size
    return Plan(
        num_pieces, workspace, workspace + LINE, pieces, finished, partials, scratch, scratch_size, end
    )


@jit
def write_pieces(job, address, write):
    """Count the pieces and the floats that partial results take, and write the pieces down if `write`."""
    starts, contexts = elements(INT32, job.query_start), elements(INT32, job.context_lens)
    count = place = 0
    for sequence in range(job.num_seqs):
        rows = (starts[sequence + 1] - starts[sequence]) * job.group
        first_position = contexts[sequence] - (starts[sequence + 1] - starts[sequence])
        splits = 1
        for first_row in range(0, rows, MAX_ROWS):
            num_rows = min(MAX_ROWS, rows - first_row)
            low = max(0, first_position + first_row // job.group - job.sliding_window + 1)
            low = low if job.sliding_window > 0 else 0
            high = first_position + (first_row + num_rows - 1) // job.group + 1
            first_split = low // SPLIT
            splits = (high - 1) // SPLIT - first_split + 1 if rows <= MAX_ROWS else 1
            for split in range(splits):
                if write:
                    piece = elements(INT64, address + count * PIECE_FIELDS * 8)
                    piece[0], piece[1], piece[2] = sequence, first_row, num_rows
                    piece[3] = max(low, (first_split + split) * SPLIT) if splits > 1 else low
                    piece[4] = min(high, (first_split + split + 1) * SPLIT) if splits > 1 else high
                    piece[5], piece[6], piece[7] = split, splits, place
                count += 1
            if splits > 1:
                place += splits * job.num_kv_heads * partial_size(job, num_rows)
    return count, place


@jit
def padded(rows):
    """Rows rounded up to whole products."""
    return (rows + ROWS - 1) // ROWS * ROWS


@jit
def partial_size(job, num_rows):
    """Floats of one partial result: per row its sum of weighted values, its maximum and its sum of weights."""
    return padded(num_rows) * (job.head_dim + 2)


class Scratch(NamedTuple):
    """One thread's scratch (addresses)."""

    query: int  # [MAX_ROWS, head_dim], scaled
    sums: int  # [MAX_ROWS, head_dim]: weighted values
    maxima: int  # [MAX_ROWS]
    weights: int  # [MAX_ROWS]: sums of weights
    scores: int  # [MAX_ROWS, TILE]
    keys: int  # [head_dim, TILE]: a tile of keys, transposed
    values: int  # [TILE, head_dim]: a tile of values, converted
    key_rows: int  # int64 [TILE]: where the tile's keys lie in the cache
    value_rows: int  # int64 [TILE]: where its values lie in the cache
    transposed_rows: int  # int64 [head_dim]: the rows of `keys`
    converted_rows: int  # int64 [TILE]: the rows of `values`
    end: int


@jit
def scratch_of(job, start):
    """Place the parts of one thread's scratch, and write down what stays the same for the whole job."""
    dim = job.head_dim
    query = start
    sums = query + MAX_ROWS * dim * 4
    maxima = sums + MAX_ROWS * dim * 4
    weights = maxima + MAX_ROWS * 4
    scores = weights + MAX_ROWS * 4
    keys = scores + MAX_ROWS * TILE * 4
    values = keys + dim * TILE * 4
    key_rows = values + TILE * dim * 4
    value_rows = key_rows + TILE * 8
    transposed_rows = value_rows + TILE * 8
    converted_rows = transposed_rows + lines(dim * 8)
    end = converted_rows + TILE * 8
    return Scratch(
        query, sums, maxima, weights, scores, keys, values, key_rows, value_rows, transposed_rows, converted_rows, end
    )


@jit
def work(job_and_plan):
    """One thread: take items until none is left."""
    job, plan = job_and_plan
    scratch = scratch_of(job, plan.scratch + next_item(plan.next_thread) * plan.scratch_size)
    transposed, converted = elements(INT64, scratch.transposed_rows), elements(INT64, scratch.converted_rows)
    for i in range(job.head_dim):
        transposed[i] = scratch.keys + i * TILE * 4
    for i in range(TILE):
        converted[i] = scratch.values + i * job.head_dim * 4
    num_items = plan.num_pieces * job.num_kv_heads
    item = next_item(plan.next_item)
    while item < num_items:
        index = item // job.num_kv_heads
        attend(job, plan, scratch, index, item - index * job.num_kv_heads)
        item = next_item(plan.next_item)


@jit
def attend(job, plan, scratch, index, head):
    """One item: a piece for one KV head."""
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    sequence, first_row, num_rows, low, high = piece[0], piece[1], piece[2], piece[3], piece[4]
    split, splits = piece[5], piece[6]
    load_query(job, scratch, sequence, head, first_row, num_rows)
    first_position = position_of(job, sequence, first_row)
    for first_key in range(low, high, TILE):
        count = min(TILE, high - first_key)
        find_rows(job, scratch, sequence, head, first_key, count)
        score(job, scratch, num_rows, count)
        weigh(job, scratch, sequence, first_row, num_rows, first_key, count)
        accumulate(job, scratch, num_rows, count)
    if splits == 1:
        write_out(job, sequence, head, first_row, num_rows, scratch.sums, scratch.weights)
        return
    size = partial_size(job, num_rows) * 4
    first = plan.partials + piece[7] * 4 + head * splits * size
    keep_partial(job, scratch, num_rows, first + split * size)
    if next_item(plan.finished + ((index - split) * job.num_kv_heads + head) * 8) == splits - 1:
        merge(job, scratch, num_rows, first, splits, size)
        write_out(job, sequence, head, first_row, num_rows, scratch.sums, scratch.weights)


@jit
def load_query(job, scratch, sequence, head, first_row, num_rows):
    """Copy the rows to scratch as scaled float32, pad with zero rows, and start their sums."""
    starts = elements(INT32, job.query_start)
    rows, sums = elements(FLOAT32, scratch.query), elements(FLOAT32, scratch.sums)
    maxima, weights = elements(FLOAT32, scratch.maxima), elements(FLOAT32, scratch.weights)
    source = elements(job.query_kind, job.query)
    scale = np.float32(job.scale)
    for row in range(padded(num_rows)):
        maxima[row] = NEVER
        weights[row] = ZERO
        place = row * job.head_dim
        token = (first_row + row) // job.group
        head_in_group = first_row + row - token * job.group
        start = (starts[sequence] + token) * job.query_token + (head * job.group + head_in_group) * job.query_head
        for i in range(job.head_dim):
            sums[place + i] = ZERO
        if row < num_rows:
            for i in range(job.head_dim):
                rows[place + i] = load(source, start + i) * scale
        else:
            for i in range(job.head_dim):
                rows[place + i] = ZERO


@jit
def position_of(job, sequence, row):
    """The position in its sequence of a row's token."""
    starts, contexts = elements(INT32, job.query_start), elements(INT32, job.context_lens)
    return contexts[sequence] - (starts[sequence + 1] - starts[sequence]) + row // job.group


@jit
def find_rows(job, scratch, sequence, head, first_key, count):
    """Look up where the tile's keys and values lie; past the end, the last one is repeated."""
    table = elements(INT32, job.block_tables + sequence * job.table_row * 4)
    keys, values = elements(INT64, scratch.key_rows), elements(INT64, scratch.value_rows)
    size = size_of(job.cache_kind)
    index = 0
    while index < count:
        logical = (first_key + index) // job.block_size
        offset = first_key + index - logical * job.block_size
        block = np.int64(table[logical])
        key = job.key_cache + (block * job.key_block + head * job.key_head + offset * job.key_slot) * size
        value = job.value_cache + (block * job.value_block + head * job.value_head + offset * job.value_slot) * size
        run_length = min(job.block_size - offset, count - index)
        for i in range(run_length):
            keys[index + i] = key + i * job.key_slot * size
            values[index + i] = value + i * job.value_slot * size
        index += run_length
    for i in range(count, TILE):
        keys[i] = keys[count - 1]
        values[i] = values[count - 1]


@jit
def score(job, scratch, num_rows, count):
    """scores = rows · keysᵀ for the tile."""
    size = size_of(job.cache_kind)
    for group in range(0, count, 16):
        for column in range(0, job.head_dim, 16):
            place = scratch.keys + (column * TILE + group) * 4
            transpose(job.cache_kind, scratch.key_rows + group * 8, column * size, place, TILE * 4)
    row_size = job.head_dim * 4
    for row in range(0, num_rows, ROWS):
        tile_product(
            FLOAT32,
            4,
            0,
            scratch.query + row * row_size,
            row_size,
            scratch.transposed_rows,
            0,
            job.head_dim,
            scratch.scores + row * TILE * 4,
            TILE * 4,
        )


@jit
def weigh(job, scratch, sequence, first_row, num_rows, first_key, count):
    """scores → weights of the online softmax; what the rows have summed up is rescaled."""
    maxima, weights = elements(FLOAT32, scratch.maxima), elements(FLOAT32, scratch.weights)
    soft_cap = np.float32(job.soft_cap)
    for row in range(num_rows):
        scores = elements(FLOAT32, scratch.scores + row * TILE * 4)
        if soft_cap > ZERO:
            cap_scores(scores, TILE, soft_cap)
        position = position_of(job, sequence, first_row + row)
        last = min(count, position + 1 - first_key)
        first = position + 1 - job.sliding_window - first_key if job.sliding_window > 0 else 0
        if first > 0 or last < TILE:
            hide_scores(scores, first, last, TILE)
        factor = online_softmax(scores, TILE, maxima, weights, row)
        if factor != ONE:
            sums = elements(FLOAT32, scratch.sums + row * job.head_dim * 4)
            for i in range(job.head_dim):
                sums[i] *= factor


@jit
def accumulate(job, scratch, num_rows, count):
    """sums += weights · values for the tile."""
    if num_rows <= DIRECT_ROWS:
        add_products(job, scratch, job.cache_kind, scratch.value_rows, num_rows, count)
        return
    values = elements(INT64, scratch.value_rows)
    for i in range(count):
        source = elements(job.cache_kind, values[i])
        converted = elements(FLOAT32, scratch.values + i * job.head_dim * 4)
        for j in range(job.head_dim):
            converted[j] = load(source, j)
    add_products(job, scratch, FLOAT32, scratch.converted_rows, num_rows, count)


@jit
def add_products(job, scratch, kind, value_rows, num_rows, count):
    """sums[4 rows, 64 or 16 columns] += weights · values, tile by tile."""
    row_size = job.head_dim * 4
    wide = job.head_dim // 64 * 64
    for row in range(0, num_rows, ROWS):
        left = scratch.scores + row * TILE * 4
        for column in range(0, wide, 64):
            result = scratch.sums + row * row_size + column * 4
            offset = column * size_of(kind)
            tile_product(kind, 4, 1, left, TILE * 4, value_rows, offset, count, result, row_size)
        for column in range(wide, job.head_dim, 16):
            result = scratch.sums + row * row_size + column * 4
            offset = column * size_of(kind)
            tile_product(kind, 1, 1, left, TILE * 4, value_rows, offset, count, result, row_size)


@jit
def write_out(job, sequence, head, first_row, num_rows, sums_address, weights_address):
    """out = sums / sum of weights."""
    starts = elements(INT32, job.query_start)
    sums, weights = elements(FLOAT32, sums_address), elements(FLOAT32, weights_address)
    out = elements(job.query_kind, job.out)
    for row in range(num_rows):
        token = (first_row + row) // job.group
        head_in_group = first_row + row - token * job.group
        start = (starts[sequence] + token) * job.out_token + (head * job.group + head_in_group) * job.out_head
        factor = ONE / weights[row]
        for i in range(job.head_dim):
            store(out, start + i, sums[row * job.head_dim + i] * factor)


@jit
def keep_partial(job, scratch, num_rows, address):
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
def merge(job, scratch, num_rows, first, splits, size):
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
