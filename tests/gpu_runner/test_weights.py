"""Reading weights: both containers, refusals that say what was found, and the fingerprint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_runner.fingerprint import fingerprint
from gpu_runner.model import default_dtype, load_model, resolve_dtype
from gpu_runner.model_config import ModelError, RopeScaling, default_eos, from_gguf, from_hf, rotary_table
from gpu_runner.weights import open_source
from kernels.backends import load
from tests.gpu_runner.gguf_support import write_gguf
from tests.gpu_runner.torch_support import TINY, all_logits, make_tiny

# --- a GGUF file is the same model as the folder it was made from ------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter lays out Q and K of Llama models: each half's value i side by side."""
    return values.view(heads, 2, 32, -1).transpose(1, 2).reshape(values.shape)


@pytest.mark.parametrize(
    ("family", "architecture"), [("llama_biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_is_the_same_model_as_its_folder(family: str, architecture: str, tmp_path: Path) -> None:
    theirs = make_tiny(family, tmp_path / "folder")
    tensors = {}
    for name, values in theirs.state_dict().items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(
                values, TINY["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            )
        tensors[gguf_name(name)] = ("F32", values.numpy())
    fields = {
        "block_count": TINY["num_hidden_layers"],
        "context_length": TINY["max_position_embeddings"],
        "embedding_length": TINY["hidden_size"],
        "feed_forward_length": TINY["intermediate_size"],
        "attention.head_count": TINY["num_attention_heads"],
        "attention.head_count_kv": TINY["num_key_value_heads"],
        "attention.key_length": TINY["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    write_gguf(tmp_path / "m.gguf", tensors, {**named, "tokenizer.ggml.eos_token_id": 7}, architecture)
    one, two = load_model(tmp_path / "folder", "float32"), load_model(tmp_path / "m.gguf", "float32")
    assert two.eos_token_ids == (7,) == one.eos_token_ids
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(*(all_logits(model, tokens, [8], load("reference")) for model in (one, two)))


def test_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path / "one")
    make_tiny("qwen2", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    models = [load_model(tmp_path / name, "float32") for name in ("one", "many")]
    assert torch.equal(*(all_logits(model, [1, 2, 3], [3], load("reference")) for model in models))


def test_progress_reaches_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.weights.PIECE_VALUES", 1000)
    make_tiny("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    load_model(tmp_path, "float32", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 1000
    assert len(seen) > 50


# --- refusals ----------------------------------------------------------------------------------------


def hf_config(**changes: Any) -> dict[str, Any]:
    return {**TINY, "architectures": ["LlamaForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is silu"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config=.*gptq.* supported is absent",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' is not supported; supported is default",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_configs_that_the_decoder_does_not_compute_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_hf(hf_config(**changes))


GGUF_CONFIG = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 128,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "gemma3"},
            "GGUF architecture gemma3 is not supported; supported are llama, qwen2",
        ),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported; supported is 0"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count=32 is not supported; supported is 64"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
    ],
)
def test_gguf_configs_that_the_decoder_does_not_compute_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        from_gguf({**GGUF_CONFIG, **changes}, 10, True)


def test_gguf_config_fills_in_what_is_not_said() -> None:
    config = from_gguf(GGUF_CONFIG, 10, True)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (2, 64, 10000.0)
    assert config.sliding_windows == (0, 0)


def test_llama3_factors_as_a_tensor_are_the_config_s_scaling() -> None:
    scaled = from_hf(
        hf_config(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        )
    )
    assert scaled.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    unscaled = from_hf(hf_config())
    ratio = rotary_table(unscaled)[1, 32:].asin() / rotary_table(scaled)[1, 32:].asin()
    torch.testing.assert_close(
        rotary_table(unscaled, ratio)[:20], rotary_table(scaled)[:20], atol=1e-4, rtol=0
    )
    assert ratio.max() == pytest.approx(8.0, rel=1e-3)


def test_places_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found a folder without config.json; want a folder with"):
        open_source(tmp_path)
    with pytest.raises(ModelError, match="found nothing"):
        open_source(tmp_path / "absent")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="found a file; want"):
        open_source(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list; want a JSON object"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(ModelError, match="lacks safetensors files"):
        open_source(tmp_path)


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, max_shard_size="40KB")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 88}))
    with pytest.raises(
        ModelError, match=r"gate_proj.weight of .* has the shape \[80, 48\]; the config wants \[88, 48\]"
    ):
        load_model(tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"model.layers.3.* is missing"):
        load_model(tmp_path, "float32")
    gone = sorted(tmp_path.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"lacks {gone.name}"):
        load_model(tmp_path, "float32")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_tiny("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: values.to(torch.int8) for name, values in load_file(file).items()}, file)
    with pytest.raises(ModelError, match=r"is torch.int8; supported are float32"):
        load_model(tmp_path, "float32")


# --- dtype, ends, fingerprint ------------------------------------------------------------------------


def test_dtype_names() -> None:
    assert resolve_dtype("auto") == default_dtype() in (torch.bfloat16, torch.float32)
    assert resolve_dtype("float16") == torch.float16
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; supported are auto, float32"):
        resolve_dtype("int4")


def test_ends_come_from_both_configs() -> None:
    assert default_eos({"eos_token_id": 2}, {"eos_token_id": [5, 2]}) == (5, 2)
    assert default_eos({"eos_token_id": None}, {}) == ()


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    first, second, cache = tmp_path / "a", tmp_path / "b", tmp_path / "cache"
    first.write_bytes(b"weights")
    second.write_bytes(b"weights")
    before = fingerprint([first], cache)
    assert before == fingerprint([second], cache) == fingerprint([first], cache)
    assert len(list(cache.iterdir())) == 2
    assert before != fingerprint([first, second], cache)
    first.write_bytes(b"Weights, longer")
    assert fingerprint([first], cache) != before


def test_fingerprint_needs_no_cache_and_trusts_no_broken_one(tmp_path: Path) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"weights")
    wanted = fingerprint([file], cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(b"half")
    assert fingerprint([file], cache) == wanted
    assert fingerprint([file], file / "not a folder") == wanted


def test_loading_sets_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny("llama", tmp_path / "m")
    one = load_model(tmp_path / "m", "float32").fingerprint
    assert one == load_model(tmp_path / "m", "bfloat16").fingerprint
    assert len(one) == 64
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text() + " ")
    assert load_model(tmp_path / "m", "float32").fingerprint != one
