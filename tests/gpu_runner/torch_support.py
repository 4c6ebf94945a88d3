"""What tests of the torch half share: tiny random models, a pool, a loop that feeds an executor by hand."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_runner.batch import build
from gpu_runner.executor import Executor
from gpu_runner.kv_cache import layer_caches, pool_shape
from gpu_runner.model import Model
from gpu_runner.step import Scheduled, Sequence, SequenceOutput, StepPlan
from kernels.backends import Ops, load
from kvmanager.protocol import Layout, SamplingParams
from tests.kernels.interpreter import load_interpreted

BLOCK_SIZE = 8
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)

TINY = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
}


def make_tiny(family: str, folder: Path, **save: Any) -> Any:
    """A random transformers model of a family, saved into `folder`; norms and biases too: they count."""
    import transformers

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**TINY, **changes})
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(len(family))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.1 if key.endswith("embed_tokens.weight") else 0.25
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if key.endswith("norm.weight"):
                parameter += 1.0
    model.save_pretrained(folder, **save)
    return model


def make_pool(model: Model, num_blocks: int, dtype: torch.dtype | None = None) -> Tensor:
    """A pool full of NaN: whatever is read before it was written shows."""
    config = model.config
    layout = Layout("", "float32", BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim)
    return torch.full(pool_shape(layout, num_blocks), torch.nan, dtype=dtype or model.dtype)


OPS = {
    "reference": partial(load, "reference", checked=True),
    "cpu": partial(load, "cpu", checked=True),
    "triton": load_interpreted,
}
"""The backends that run here, each with its arguments checked."""


def make_executor(model: Model, num_blocks: int = 64, backend: Any = "reference") -> Executor:
    return Executor(model, make_pool(model, num_blocks), OPS[backend]())


def make_sequences(
    prompts: list[list[int]], tokens: int, sampling: SamplingParams = GREEDY
) -> list[Sequence]:
    """Sequences with tables for prompt and `tokens` more, in blocks that are handed out from the top down."""
    blocks, sequences = 0, []
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + tokens) // BLOCK_SIZE)
        table = list(range(blocks, blocks + count))[::-1]
        blocks += count
        sequences.append(Sequence(index, 0, sampling, len(prompt), list(prompt), table, 0))
    return sequences


def schedule(sequence: Sequence, length: int | None = None, choices: tuple[int, ...] = (0,)) -> Scheduled:
    """The next `length` tokens (by default all known ones); `choices` are drawn if that reaches the last."""
    start = sequence.num_computed_tokens
    rest = len(sequence.token_ids) - start
    length = rest if length is None else min(length, rest)
    return Scheduled(sequence, start, length, choices if length == rest else ())


def step(executor: Executor, sequences: list[Sequence], chunk: int | None = None) -> list[SequenceOutput]:
    """One step over all sequences; each takes the token that was drawn for it."""
    plan = StepPlan(tuple(schedule(sequence, chunk) for sequence in sequences))
    outputs = list(executor.execute(plan).outputs)
    for item, output in zip(plan.scheduled, outputs, strict=True):
        item.sequence.num_computed_tokens += item.length
        item.sequence.token_ids += [sampled.token_id for sampled in output.sampled]
    return outputs


def generate(
    executor: Executor,
    prompts: list[list[int]],
    tokens: int,
    sampling: SamplingParams = GREEDY,
    chunk: int | None = None,
) -> list[list[int]]:
    """`tokens` output tokens for every prompt, all in one batch; prefill in chunks of `chunk` tokens."""
    sequences = make_sequences(prompts, tokens, sampling)
    while any(len(item.token_ids) < item.num_prompt_tokens + tokens for item in sequences):
        step(
            executor,
            [item for item in sequences if len(item.token_ids) < item.num_prompt_tokens + tokens],
            chunk,
        )
    return [item.token_ids[item.num_prompt_tokens :] for item in sequences]


@torch.inference_mode()
def all_logits(model: Model, tokens: list[int], parts: list[int], ops: Ops) -> Tensor:
    """Logits of every position `[len(tokens), vocab]`, computed in `parts` (lengths that add up)."""
    pool = make_pool(model, 64)
    (sequence,) = make_sequences([tokens], 0)
    rows = []
    for length in parts:
        batch = build(StepPlan((schedule(sequence, length),)), BLOCK_SIZE, model.device)
        rows.append(model.logits(model.forward(batch, layer_caches(pool), ops)))
        sequence.num_computed_tokens += length
    return torch.cat(rows)


def with_params(**changes: Any) -> SamplingParams:
    """Sampling parameters: greedy's, but for what is given."""
    values = {name: getattr(GREEDY, name) for name in GREEDY.__struct_fields__}
    return SamplingParams(**{**values, **changes})


def renamed(sequence: Sequence, **changes: Any) -> Sequence:
    return replace(sequence, **changes)
