"""A step's tensors, made from its plan with a few numpy calls: which token, at which place, in which slot.

plan:      decode A (1 token)   decode B (1 token)   chunk of C (3 tokens)
tokens     a9                   b4                   c0 c1 c2               [num_tokens]
query_start 0                   1                    2           5          [num_seqs + 1]
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_runner.step import StepPlan


@dataclass(slots=True, frozen=True)
class Batch:
    """What the model reads in a step, on its device. A slot is block_id · block_size + offset."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    block_tables: Tensor  # int32 [num_seqs, longest table]; unused entries are 0
    query_start: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs], tokens including this step's


def build(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """The tensors of a plan with at least one token."""
    scheduled = plan.scheduled
    count = len(scheduled)
    starts = np.fromiter((item.start for item in scheduled), np.int64, count)
    lengths = np.fromiter((item.length for item in scheduled), np.int64, count)
    ends = starts + lengths
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])
    tables = _block_tables(plan, -(-ends // block_size))
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    blocks = tables[np.repeat(np.arange(count), lengths), positions // block_size]
    tokens = [
        token
        for item in scheduled
        for token in item.sequence.token_ids[item.start : item.start + item.length]
    ]

    def move(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(dtype).to(device, non_blocking=True)

    return Batch(
        token_ids=move(np.array(tokens, np.int64), torch.int64),
        positions=move(positions, torch.int64),
        slot_mapping=move(blocks * block_size + positions % block_size, torch.int64),
        block_tables=move(tables, torch.int32),
        query_start=move(query_start, torch.int32),
        context_lens=move(ends, torch.int32),
    )


def _block_tables(
    plan: StepPlan, used: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """`[num_seqs, longest]`: of each table the blocks that this step's context lies in."""
    tables = np.zeros((len(used), int(used.max())), np.int64)
    for row, (item, blocks) in enumerate(zip(plan.scheduled, used.tolist(), strict=True)):
        tables[row, :blocks] = item.sequence.block_table[:blocks]
    return tables
