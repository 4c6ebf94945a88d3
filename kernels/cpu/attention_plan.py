"""What paged_attention does before its threads start: cut the batch into pieces, and place scratch memory."""

from typing import NamedTuple

from kernels.cpu.columns import num_bands
from kernels.cpu.jit import jit
from kernels.cpu.memory import INT32, INT64, LINE, Kind, elements
from kernels.cpu.spans import AHEAD, SPAN
from kernels.cpu.tile import ROWS, TILE

MAX_ROWS = 96  # rows of a piece: enough to pay for transposing the keys once per piece
FEW_ROWS = 16  # up to so many do not pay for it, and are multiplied with keys and values as they lie
SPLIT = 256  # keys of a piece of a split sequence
TURN_HEADS = 8  # most KV heads that a thread takes at a time
LAST_PIECES = 1  # pieces per thread that are shared out head by head, so that threads end at the same time
SEATED_ROWS = max(MAX_ROWS, TURN_HEADS * FEW_ROWS)  # rows that a thread has at a time
# Fields of a piece: sequence, first row, rows, first key, end of keys, split, splits, place of its results
PIECE_FIELDS = 8


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
    """Where the parts of the workspace lie (addresses), and how the pieces are shared out.

    A turn is what a thread takes at a time: a piece for some KV heads.
    """

    num_turns: int
    wide_turns: int  # the first ones, for up to TURN_HEADS heads; the others are for one
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
def turns_of(num_kv_heads: int) -> int:
    """Wide turns of a piece."""
    return (num_kv_heads + TURN_HEADS - 1) // TURN_HEADS


@jit
def lay_out(job: Job, workspace: int, num_pieces: int, partial_floats: int, threads: int) -> Plan:
    """Place the parts one after the other, behind the pieces that are written already."""
    heads = job.num_kv_heads
    pieces = pieces_in(workspace)
    finished = lines(pieces + num_pieces * PIECE_FIELDS * 8)
    partials = finished + lines(num_pieces * heads * 8)
    scratch = partials + lines(partial_floats * 4)
    scratch_size = scratch_of(job, scratch).end - scratch
    end = scratch + threads * scratch_size
    last_pieces = min(num_pieces, LAST_PIECES * threads)
    wide_turns = (num_pieces - last_pieces) * turns_of(heads)
    num_turns = wide_turns + last_pieces * heads
    counters, places = (workspace, workspace + LINE), (pieces, finished, partials, scratch)
    return Plan(num_turns, wide_turns, *counters, *places, scratch_size, end)


@jit
def pieces_in(workspace: int) -> int:
    """Where the pieces lie: behind the counters."""
    return workspace + 2 * LINE


@jit
def write_pieces(job: Job, address: int, end: int) -> tuple[int, int, int]:
    """Write the pieces at an address, as far as they fit before `end`.

    Returns how many there are, the floats of their partial results, and the work.
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
                here = address + count * PIECE_FIELDS * 8
                if here + PIECE_FIELDS * 8 <= end:
                    piece = elements(INT64, here)
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

    query: int  # [SEATED_ROWS, head_dim], scaled
    sums: int  # [SEATED_ROWS, head_dim]: weighted values
    maxima: int  # [SEATED_ROWS]
    weights: int  # [SEATED_ROWS]: sums of weights
    scores: int  # [MAX_ROWS, TILE] or [TURN_HEADS, FEW_ROWS, SPLIT]
    keys: int  # [head_dim, TILE]: a tile of keys, transposed
    values: int  # [TILE, head_dim]: a tile of values, converted
    rows: int  # int64 [2, 2, TILE]: where the keys and values of this tile and the next lie
    transposed_rows: int  # int64 [head_dim]: the rows of `keys`
    converted_rows: int  # int64 [TILE]: the rows of `values`
    spans: int  # [2] lists of int64, of spans_size bytes each: this turn's spans and the next one's
    end: int


@jit
def scratch_of(job: Job, start: int) -> Scratch:
    """Place the parts of one thread's scratch."""
    dim = job.head_dim
    query = start
    sums = query + SEATED_ROWS * dim * 4
    maxima = sums + SEATED_ROWS * dim * 4
    weights = maxima + SEATED_ROWS * 4
    scores = weights + SEATED_ROWS * 4
    keys = scores + max(MAX_ROWS * TILE, TURN_HEADS * FEW_ROWS * SPLIT) * 4
    values = keys + dim * TILE * 4
    rows = values + TILE * dim * 4
    transposed_rows = rows + 4 * TILE * 8
    converted_rows = transposed_rows + lines(dim * 8)
    spans = converted_rows + TILE * 8
    end = spans + 2 * spans_size(job)
    places = query, sums, maxima, weights, scores, keys, values, rows
    return Scratch(*places, transposed_rows, converted_rows, spans, end)


@jit
def spans_size(job: Job) -> int:
    """Bytes of the longest list of a turn's spans and of AHEAD more: once for keys, per band for values."""
    return lines((TURN_HEADS * (1 + num_bands(job.head_dim)) * (SPLIT // SPAN) + AHEAD) * 8)


class Seat(NamedTuple):
    """The part of a thread's scratch for the rows of a piece for one KV head (addresses)."""

    query: int
    sums: int
    maxima: int
    weights: int
    scores: int


@jit
def seat_of(job: Job, scratch: Scratch, index: int) -> Seat:
    """Place `index` of those for few rows; the first one is also that for many."""
    first_row = index * FEW_ROWS
    wide, narrow = first_row * job.head_dim * 4, first_row * 4
    return Seat(
        scratch.query + wide,
        scratch.sums + wide,
        scratch.maxima + narrow,
        scratch.weights + narrow,
        scratch.scores + first_row * SPLIT * 4,
    )
