"""From logits to what a beam search chooses from: each beam's likeliest next tokens."""

import math
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from gpu_runner.beams import num_candidates
from gpu_runner.logits import change, needs_change
from gpu_runner.logprobs import token_logprobs
from gpu_runner.step import Candidate, Sequence


def candidates(
    logits: Tensor, beams: Items[tuple[int, Sequence]], eos_token_ids: tuple[int, ...]
) -> list[tuple[Candidate, ...]]:
    """For every beam (row of `logits` `[rows, vocab]`, sequence) its candidates, likeliest first.

    As in transformers, bias and penalties change the log-probabilities (log_softmax in float32), which are
    not normalised again. Tokens of probability 0 are left out.
    """
    if not beams:
        return []
    rows = [row for row, _ in beams]
    values = torch.log_softmax(logits[rows].float(), dim=-1)
    for place, (_, sequence) in enumerate(beams):
        if needs_change(sequence):
            changed = values[place].cpu()
            change(changed, sequence, eos_token_ids)
            values[place] = changed
    counts = [num_candidates(sequence.sampling, eos_token_ids) for _, sequence in beams]
    best, ids = values.topk(min(max(counts), values.shape[1]), dim=-1)
    found = []
    for (row, sequence), row_ids, row_best, count in zip(
        beams, ids.tolist(), best.tolist(), counts, strict=True
    ):
        offers = [pair for pair in zip(row_ids[:count], row_best[:count], strict=True) if pair[1] > -math.inf]
        found.append(_with_logprobs(logits[row], sequence, offers))
    return found


def _with_logprobs(row: Tensor, sequence: Sequence, offers: list[tuple[int, float]]) -> tuple[Candidate, ...]:
    alternatives = sequence.sampling.logprobs
    if alternatives is None:
        return tuple(Candidate(token, logprob) for token, logprob in offers)
    tokens = [token for token, _ in offers]
    entries = token_logprobs(row.expand(len(tokens), -1), tokens, [alternatives] * len(tokens))
    return tuple(
        Candidate(token, logprob, entry) for (token, logprob), entry in zip(offers, entries, strict=True)
    )
