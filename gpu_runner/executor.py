"""One step on the device: copies, the model over all scheduled tokens, logits where needed, next tokens."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_runner.batch import build
from gpu_runner.beam_candidates import candidates
from gpu_runner.kv_cache import layer_caches
from gpu_runner.logprobs import token_logprobs
from gpu_runner.model import Model
from gpu_runner.sampler import Draw, sample
from gpu_runner.step import Candidate, Sampled, Scheduled, SequenceOutput, StepOutput, StepPlan
from kernels.backends import Ops
from kvmanager.protocol import TokenLogprobs

PROMPT_ROWS = 64  # rows of prompt logits held at once: 64 of 128,000 words are 32 MB in float32


class Executor:
    """Runs plans for one model on one pool. Holds no state of sequences."""

    def __init__(self, model: Model, pool: Tensor, ops: Ops) -> None:
        """`pool` is that of `kv_cache.map_pool`; `ops` is a backend that works on its device."""
        self.model = model
        self.pool = pool
        self.ops = ops
        self.block_size = pool.shape[4]
        self._caches = layer_caches(pool)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Copy, compute, sample; all scheduled tokens' keys and values are in the pool when this returns."""
        if plan.copies:
            self.ops.copy_blocks(
                self.pool, torch.tensor(plan.copies, dtype=torch.int64, device=self.pool.device)
            )
        if not plan.scheduled:
            return StepOutput(())
        batch = build(plan, self.block_size, self.model.device)
        hidden = self.model.forward(batch, self._caches, self.ops)
        ends = batch.query_start[1:] - 1
        sampled, offers = self._choose(plan, hidden, ends)
        outputs = []
        first = 0
        for item in plan.scheduled:
            prompt = self._prompt_logprobs(item, hidden[first : first + item.length])
            drawn = () if _is_beam(item) else tuple(itertools.islice(sampled, len(item.sample_choices)))
            offered = next(offers) if _is_beam(item) and item.sample_choices else ()
            outputs.append(SequenceOutput(drawn, prompt, offered))
            first += item.length
        return StepOutput(tuple(outputs))

    def _choose(
        self, plan: StepPlan, hidden: Tensor, ends: Tensor
    ) -> tuple[Iterator[Sampled], Iterator[tuple[Candidate, ...]]]:
        """For all sequences that reached their end, in the plan's order: a token for each choice, but for
        beams their candidates.
        """
        asking = [index for index, item in enumerate(plan.scheduled) if item.sample_choices]
        if not asking:
            return iter(()), iter(())
        rows = hidden if len(asking) == len(hidden) else hidden[ends[asking].long()]
        logits, eos_token_ids = self.model.logits(rows), self.model.eos_token_ids
        items = [(row, plan.scheduled[index]) for row, index in enumerate(asking)]
        draws = [
            Draw(row, item.sequence, choice)
            for row, item in items
            if not _is_beam(item)
            for choice in item.sample_choices
        ]
        beams = [(row, item.sequence) for row, item in items if _is_beam(item)]
        return iter(sample(logits, draws, eos_token_ids)), iter(candidates(logits, beams, eos_token_ids))

    def _prompt_logprobs(self, item: Scheduled, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """For each computed position before a prompt token: the log-probability of that token."""
        sequence = item.sequence
        alternatives = sequence.sampling.prompt_logprobs
        last = min(item.start + item.length, sequence.num_prompt_tokens - 1)
        if alternatives is None or last <= item.start:
            return ()
        found: list[TokenLogprobs] = []
        for first in range(item.start, last, PROMPT_ROWS):
            end = min(first + PROMPT_ROWS, last)
            logits = self.model.logits(hidden[first - item.start : end - item.start])
            tokens = sequence.token_ids[first + 1 : end + 1]
            found += token_logprobs(logits, tokens, [alternatives] * len(tokens))
        return tuple(found)


def _is_beam(item: Scheduled) -> bool:
    return item.sequence.sampling.beam is not None
