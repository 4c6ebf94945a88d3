"""One thread of paged_attention: it takes turns, which are a piece for some KV heads, until none is left."""

from kernels.cpu.attention_few import attend_few, list_spans
from kernels.cpu.attention_many import attend_many, list_scratch_rows
from kernels.cpu.attention_plan import PIECE_FIELDS, TURN_HEADS, Job, Plan, scratch_of, spans_size, turns_of
from kernels.cpu.jit import jit, next_item
from kernels.cpu.memory import INT64, elements
from kernels.cpu.spans import AHEAD


@jit
def work(job_and_plan: tuple[Job, Plan]) -> None:
    """Take turns; while one is computed, the first spans of the next one are prefetched."""
    job, plan = job_and_plan
    scratch = scratch_of(job, plan.scratch + next_item(plan.next_thread) * plan.scratch_size)
    list_scratch_rows(job, scratch)
    spans, next_spans = scratch.spans, scratch.spans + spans_size(job)
    turn = next_item(plan.next_turn)
    count = list_turn(job, plan, turn, spans) if turn < plan.num_turns else 0
    while turn < plan.num_turns:
        upcoming = next_item(plan.next_turn)
        next_count = list_turn(job, plan, upcoming, next_spans) if upcoming < plan.num_turns else 0
        index, first_head, heads = heads_of(job, plan, turn)
        if count:
            append(spans, count, next_spans, next_count)
            attend_few(job, plan, scratch, index, first_head, heads, spans)
        else:
            for head in range(first_head, first_head + heads):
                attend_many(job, plan, scratch, index, head)
        spans, next_spans = next_spans, spans
        turn, count = upcoming, next_count


@jit
def heads_of(job: Job, plan: Plan, turn: int) -> tuple[int, int, int]:
    """The index of the turn's piece, its first KV head and how many it takes."""
    heads, turns = job.num_kv_heads, turns_of(job.num_kv_heads)
    if turn < plan.wide_turns:
        index = turn // turns
        first_head = (turn - index * turns) * TURN_HEADS
        return index, first_head, min(TURN_HEADS, heads - first_head)
    index = (turn - plan.wide_turns) // heads
    return plan.wide_turns // turns + index, turn - plan.wide_turns - index * heads, 1


@jit
def list_turn(job: Job, plan: Plan, turn: int, spans: int) -> int:
    """list_spans for a turn."""
    index, first_head, heads = heads_of(job, plan, turn)
    piece = elements(INT64, plan.pieces + index * PIECE_FIELDS * 8)
    return list_spans(job, piece, first_head, heads, spans)


@jit
def append(spans: int, count: int, next_spans: int, next_count: int) -> None:
    """Let the next turn's first spans follow, or the last one again where there are none."""
    listed, following = elements(INT64, spans), elements(INT64, next_spans)
    for i in range(AHEAD):
        listed[count + i] = following[i] if i < next_count else listed[count - 1]
