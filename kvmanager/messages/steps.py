"""What a runner reports about its steps: part of `kvmanager.protocol`, from where it is to be imported."""

from typing import Literal

from kvmanager.messages.sampling_params import Message
from kvmanager.messages.tokens import SearchState

BlockRef = tuple[int, int]
"""(block_id, generation): so that a late message cannot touch a block's next life."""


class Progress(Message, frozen=True):
    """A sequence's KV has passed at least one block boundary: seal its full blocks.

    `new_token_ids` are the output tokens that the manager has not been told yet (it knows the prompt);
    `num_computed_tokens` counts all tokens of the sequence whose KV is in its blocks.
    """

    start_id: int
    choice: int
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int


class Forked(Message, frozen=True):
    """`children` now share the whole block table of `choice`, and its tokens as far as they were reported.

    They are choices of the Start's that were still to come, or beams: numbers below MAX_CHOICES that no other
    sequence of the start has (one that has ended may be used again, by a later report).
    """

    start_id: int
    choice: int
    children: tuple[int, ...]


class Ended(Message, frozen=True):
    """A sequence no longer runs and no step in flight writes its blocks: they go back to the manager.

    For "preempted", `new_token_ids` complete the manager's copy of the output, so that it can be resumed
    exactly. "dropped" is a beam that others have outlived: its request goes on without it.
    """

    start_id: int
    choice: int
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int
    reason: Literal["finished", "cancelled", "preempted", "dropped"]
    search: SearchState | None = None  # where a preempted beam search stands, once, with any of its beams


class Copied(Message, frozen=True):
    """Copy-on-write: entry `index` of the table of (start_id, choice) is now `block`, which was a credit."""

    start_id: int
    choice: int
    index: int
    block: BlockRef


class Taken(Message, frozen=True):
    """Credits that became the next entries of a sequence's block table, in order."""

    start_id: int
    choice: int
    blocks: tuple[BlockRef, ...]


class StepReport(Message, frozen=True, tag=True):
    """What changed in one step; sent before the next step computes, and only if something changed.

    Applied in the order of its fields, but `sources_read` first. `credits_wanted` is how many credits the
    runner wants to hold in all. `num_tail_tokens` counts the tokens, those of the step about to be computed
    included, in its sequences' blocks that are not sealed; once where sequences share one.
    """

    progress: tuple[Progress, ...] = ()
    forked: tuple[Forked, ...] = ()
    ended: tuple[Ended, ...] = ()
    copied: tuple[Copied, ...] = ()
    taken: tuple[Taken, ...] = ()
    returned: tuple[BlockRef, ...] = ()  # credits handed back unused
    credits_wanted: int = 0
    sources_read: tuple[tuple[int, int], ...] = ()  # (start_id, choice) whose `copy_from` has been copied
    num_tail_tokens: int = 0


class HeldSequence(Message, frozen=True):
    """A running sequence, as its runner has it between two steps. The KV of its first `num_computed_tokens`
    tokens is in `block_table` (block ids); it will still fork into `forks`.
    """

    choice: int
    output_token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    num_computed_tokens: int
    forks: tuple[int, ...] = ()


class HeldStart(Message, frozen=True):
    """A start that runs. What it computes is known by its request, which the frontend behind `token_endpoint`
    submitted.
    """

    start_id: int
    request_id: str
    attempt: int
    token_endpoint: str
    sequences: tuple[HeldSequence, ...]


class Holdings(Message, frozen=True):
    """All that a runner holds: for a manager that has restarted. `credits` are in no table yet."""

    starts: tuple[HeldStart, ...] = ()
    credits: tuple[BlockRef, ...] = ()
