"""What changes a row of logits before a token is chosen: bias, penalties, and tokens that may not come yet.

Repetition counts every token of the sequence, presence and frequency only its output (as vLLM and OpenAI
have it).
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gpu_runner.step import Sequence
from kvmanager.protocol import SamplingParams


def needs_change(sequence: Sequence) -> bool:
    """Whether this sequence's next token is drawn from anything but the plain logits."""
    params = sequence.sampling
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or _too_short(sequence)
    )


def change(row: Tensor, sequence: Sequence, eos_token_ids: Iterable[int]) -> None:
    """Apply everything to one float32 row `[vocab]` (on the CPU), in place."""
    params = sequence.sampling
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if params.repetition_penalty != 1.0:
        _penalise_repetition(row, sequence, params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        _penalise_output(row, output, params)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if _too_short(sequence):
        row[list({*eos_token_ids, *params.stop_token_ids})] = -torch.inf


def _too_short(sequence: Sequence) -> bool:
    return len(sequence.token_ids) - sequence.num_prompt_tokens < sequence.sampling.min_tokens


def _penalise_repetition(row: Tensor, sequence: Sequence, penalty: float) -> None:
    """Logits of tokens seen before are divided by the penalty where positive, multiplied where negative."""
    prompt = sequence.extra.get("prompt_tokens")
    if prompt is None:
        prompt = sequence.extra["prompt_tokens"] = np.unique(sequence.token_ids[: sequence.num_prompt_tokens])
    assert isinstance(prompt, np.ndarray)
    output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], np.int64)
    seen = torch.from_numpy(np.union1d(prompt, output))
    values = row[seen]
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_output(row: Tensor, output: list[int], params: SamplingParams) -> None:
    tokens, counts = np.unique(output, return_counts=True)
    penalty = params.presence_penalty + params.frequency_penalty * counts
    row[torch.from_numpy(tokens)] -= torch.from_numpy(penalty.astype(np.float32))
