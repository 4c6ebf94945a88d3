"""What a model is: the numbers of its architecture, from a Hugging Face `config.json` or from GGUF metadata.

Three families share one decoder (`model.py`): Llama (so Mistral and SmolLM2), Qwen2 (biases on Q, K and V)
and Qwen3 (RMS norm per head on Q and K). What the decoder does not compute is refused here, by name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class ModelError(ValueError):
    """A model that cannot be loaded: says what was found, and what is supported."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear` divides all by `factor`, `llama3` the low ones."""

    kind: str = "none"  # none, linear, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. `sliding_windows` has one entry per layer, in tokens; 0 is full attention."""

    architecture: str  # llama, qwen2, qwen3
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int  # tokens
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    sliding_windows: tuple[int, ...]
    tie_word_embeddings: bool


def default_eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: those of `generation_config.json` and `config.json` together."""
    found: dict[int, None] = {}
    for source in (generation, config):
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the content of a `config.json`. Raises ModelError for what the decoder does not compute."""
    names = config.get("architectures") or ["none"]
    family = HF_ARCHITECTURES.get(names[0])
    if family is None:
        raise ModelError(
            f"architecture {names[0]} is not supported; supported are {', '.join(HF_ARCHITECTURES)}"
        )
    _refuse_unless("hidden_act", config.get("hidden_act", "silu"), ("silu",))
    _refuse_unless("quantization_config", config.get("quantization_config"), (None,))
    _refuse_unless("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0, (1.0,))
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelConfig(
        architecture=family,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_hf_rope_scaling(rope),
        sliding_windows=_hf_sliding_windows(config, layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_unless(name: str, value: Any, supported: Sequence[Any]) -> None:
    if value not in supported:
        words = ", ".join("absent" if item is None else str(item) for item in supported)
        raise ModelError(f"{name}={value!r} is not supported; supported is {words}")


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _refuse_unless("rope_scaling type", kind, ("default", "linear", "llama3"))
    _refuse_unless("partial_rotary_factor", rope.get("partial_rotary_factor") or 1.0, (1.0,))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _hf_sliding_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers see only a window: `layer_types` says so; else all do, but for Qwen's own two fields."""
    window = config.get("sliding_window") or 0
    if not config.get("use_sliding_window", True):
        window = 0
    types = config.get("layer_types")
    if types is None and "use_sliding_window" in config:
        first = config.get("max_window_layers", layers)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    types = types or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def from_gguf(metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> ModelConfig:
    """Read GGUF metadata. `vocab_size`: the embedding's rows; `tied`: there is no output matrix."""
    name = metadata.get("general.architecture", "none")
    family = GGUF_ARCHITECTURES.get(name)
    if family is None:
        raise ModelError(
            f"GGUF architecture {name} is not supported; supported are {', '.join(GGUF_ARCHITECTURES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    for per_layer in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(field(per_layer), list):
            raise ModelError(
                f"{name}.{per_layer} differs from layer to layer; supported is one number for all"
            )
    heads, hidden, layers = field("attention.head_count"), field("embedding_length"), field("block_count")
    head_dim = field("attention.key_length", hidden // heads)
    _refuse_unless(f"{name}.expert_count", field("expert_count", 0), (0,))
    _refuse_unless(f"{name}.rope.dimension_count", field("rope.dimension_count", head_dim), (head_dim,))
    scaling = field("rope.scaling.type", "none")
    _refuse_unless(f"{name}.rope.scaling.type", scaling, ("none", "linear"))
    return ModelConfig(
        architecture=family,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        vocab_size=vocab_size,
        max_model_len=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=float(field("rope.freq_base", 10000.0)),
        rope_scaling=RopeScaling(scaling, float(field("rope.scaling.factor", 1.0))),
        sliding_windows=(field("attention.sliding_window", 0),) * layers,
        tie_word_embeddings=tied,
    )


def rotary_table(config: ModelConfig, factors: Tensor | None = None) -> Tensor:
    """float32 `[max_model_len, head_dim]`: per position the cosines, then the sines.

    `factors` `[head_dim / 2]` divide the frequencies: a GGUF file holds llama3 scaling as a tensor of these.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors.float()
    angles = torch.outer(torch.arange(config.max_model_len).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long wavelengths are divided, short ones are left alone, those between are blended.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)
