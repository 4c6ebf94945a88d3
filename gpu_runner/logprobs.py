"""Log-probabilities for clients: of the model's own distribution, before penalties and temperature."""

import torch
from torch import Tensor

from kvmanager.protocol import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: list[int], alternatives: list[int]) -> list[TokenLogprobs]:
    """Per row of `logits` `[rows, vocab]`: its token's log-probability and rank, and the likeliest ones."""
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (values > chosen).sum(dim=-1) + 1
    best, ids = values.topk(max(alternatives), dim=-1)
    rows = zip(chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), best.tolist(), alternatives, strict=True)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(row_ids[:count], row_best[:count], strict=True)))
        for logprob, rank, row_ids, row_best, count in rows
    ]
