"""What paged_attention does before its threads start: cut the batch into pieces, and place scratch memory."""

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.jit import jit
from kernels.cpu.memory import INT32, INT64, Kind, elements
from kernels.cpu.tile import LINE, ROWS, TILE

MAX_ROWS = 96  # rows of a piece: enough to pay for transposing the keys once per piece
SPLIT = 256  # keys of a piece of a split sequence
LONG_TILE = 128  # keys of a tile of at most 4 rows, for which a softmax costs as much as 16 keys do
TURNS = 4  # turns per thread from which on a turn is a whole piece: its heads lie in the same pages of memory
PIECE_FIELDS = (
    8  # sequence, first row, rows, first key, end of keys, split, splits, place of the partial results
)

NOWHERE: Any = np.int64(0)  # an address; a plain 0 would be a type of its own, and compiled for again


class Job(NamedTuple):
    """The arguments: tensors as addresses, strides in elements."""

    query_kind: Kind
    cache_kind: Kind
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
    turn_items: int  # items that a thread takes at a time
    next_turn: int  # int64 counter of turns taken
    next_thread: int  # int64 counter of threads that came
    pieces: int  # PIECE_FIELDS × int64 each
    finished: int  # int64 per piece and KV head: splits of that sequence that are done
    partials: int
    scratch: int
    scratch_size: int
    end: int


@jit
def lines(size: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return (size + LINE - 1) // LINE * LINE


@jit
def lay_out(job: Job, workspace: int, num_pieces: int, partial_floats: int, threads: int) -> Plan:
    """Place the parts one after the other."""
    pieces = workspace + 2 * LINE
    finished = pieces + lines(num_pieces * PIECE_FIELDS * 8)
    partials = finished + lines(num_pieces * job.num_kv_heads * 8)
    scratch = partials + lines(partial_floats * 4)
    scratch_size = scratch_of(job, scratch).end - scratch
    end = scratch + threads * scratch_size
    turn_items = job.num_kv_heads if num_pieces >= TURNS * threads else 1
    counters = workspace, workspace + LINE
    return Plan(num_pieces, turn_items, *counters, pieces, finished, partials, scratch, scratch_size, end)


@jit
def write_pieces(job: Job, address: int) -> tuple[int, int, int]:
    """Count the pieces, the floats of their partial results and the work; write the pieces at an address.

    Work is what shares it out well: elements of keys that pass by, per started product of 4 rows.
    """
    starts, contexts = elements(INT32, job.query_start), elements(INT32, job.context_lens)
    count = place = work = 0
    for sequence in range(job.num_seqs):
        rows = (starts[sequence + 1] - starts[sequence]) * job.group
        first_position = contexts[sequence] - (starts[sequence + 1] - starts[sequence])
        for first_row in range(0, rows, MAX_ROWS):
            num_rows = min(MAX_ROWS, rows - first_row)
            low = max(0, first_position + first_row // job.group - job.sliding_window + 1)
            low = low if job.sliding_window > 0 else 0
            high = first_position + (first_row + num_rows - 1) // job.group + 1
            first_split = low // SPLIT
            work += (high - low) * job.head_dim * job.num_kv_heads * (padded(num_rows) // ROWS)
            splits = (high - 1) // SPLIT - first_split + 1 if rows <= MAX_ROWS else 1
            for split in range(splits):
                if address != NOWHERE:
                    piece = elements(INT64, address + count * PIECE_FIELDS * 8)
                    piece[0], piece[1], piece[2] = sequence, first_row, num_rows
                    piece[3] = max(low, (first_split + split) * SPLIT) if splits > 1 else low
                    piece[4] = min(high, (first_split + split + 1) * SPLIT) if splits > 1 else high
                    piece[5], piece[6], piece[7] = split, splits, place
                count += 1
            if splits > 1:
                place += splits * job.num_kv_heads * partial_size(job, num_rows)
    return count, place, work


@jit
def padded(rows: int) -> int:
    """Rows rounded up to whole products."""
    return (rows + ROWS - 1) // ROWS * ROWS


@jit
def partial_size(job: Job, num_rows: int) -> int:
    """Floats of one partial result: per row its weighted values, its maximum and its sum of weights."""
    return padded(num_rows) * (job.head_dim + 2)


class Scratch(NamedTuple):
    """One thread's scratch (addresses)."""

    query: int  # [MAX_ROWS, head_dim], scaled
    sums: int  # [MAX_ROWS, head_dim]: weighted values
    maxima: int  # [MAX_ROWS]
    weights: int  # [MAX_ROWS]: sums of weights
    scores: int  # [MAX_ROWS, TILE] or [ROWS, LONG_TILE]
    keys: int  # [head_dim, TILE]: a tile of keys, transposed
    values: int  # [TILE, head_dim]: a tile of values, converted
    rows: int  # int64 [2, 2, LONG_TILE]: where the keys and values of this tile and the next lie
    transposed_rows: int  # int64 [head_dim]: the rows of `keys`
    converted_rows: int  # int64 [TILE]: the rows of `values`
    end: int


@jit
def scratch_of(job: Job, start: int) -> Scratch:
    """Place the parts of one thread's scratch, and write down what stays the same for the whole job."""
    dim = job.head_dim
    query = start
    sums = query + MAX_ROWS * dim * 4
    maxima = sums + MAX_ROWS * dim * 4
    weights = maxima + MAX_ROWS * 4
    scores = weights + MAX_ROWS * 4
    keys = scores + MAX_ROWS * TILE * 4
    values = keys + dim * TILE * 4
    rows = values + TILE * dim * 4
    transposed_rows = rows + 4 * LONG_TILE * 8
    converted_rows = transposed_rows + lines(dim * 8)
    end = converted_rows + TILE * 8
    return Scratch(
        query,
        sums,
        maxima,
        weights,
        scores,
        keys,
        values,
        rows,
        transposed_rows,
        converted_rows,
        end,
    )
