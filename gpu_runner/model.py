"""The decoder of Llama, Mistral, Qwen2 and Qwen3: what differs between them is which tensors are there.

x = embedding[token]
per layer:  x += O · attention(norm(x))        Q, K and V are one matrix product (with biases in Qwen2),
            x += down · (silu(gate) · up)      gate and up are one; Qwen3 norms each head of Q and K
logits = lm_head · norm(x)
"""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpu_runner.attention import AttentionInput, attend
from gpu_runner.batch import Batch
from gpu_runner.fingerprint import fingerprint
from gpu_runner.kv_cache import LayerCaches
from gpu_runner.linear import Linear
from gpu_runner.model_config import ModelConfig, ModelError, rotary_table
from gpu_runner.weights import Progress, Source, Weights, open_source
from kernels.backends import Ops

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """What "auto" means: bfloat16 where the device computes with it, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """A dtype's name, or "auto". Raises ModelError for another."""
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(slots=True)
class Layer:
    """One decoder layer's tensors; `query_norm` and `key_norm` are Qwen3's."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int  # tokens; 0 is full attention


class Model:
    """A loaded decoder. `forward` and `logits` run under `torch.inference_mode()`."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates every tensor; they hold values after `weights.fill`."""
        source = weights.source
        config = source.config
        self.config: ModelConfig = config
        self.eos_token_ids = source.eos_token_ids
        self.fingerprint = ""
        self.dtype = dtype
        self.device = device
        self.on_layer: Callable[[], None] = lambda: None
        """Called before each layer: a long prompt on a slow machine takes long."""
        self.cos_sin = rotary_table(config, source.rope_factors).to(device)
        hidden = config.hidden_size
        self.embedding = Linear(weights.matrix({"model.embed_tokens.weight": config.vocab_size}, hidden))
        self.layers = [_layer(weights, config, index) for index in range(config.num_layers)]
        self.norm = weights.vector({"model.norm.weight": hidden})
        if config.tie_word_embeddings:
            self.lm_head = self.embedding
        else:
            self.lm_head = Linear(weights.matrix({"lm_head.weight": config.vocab_size}, hidden))

    def prepare(self) -> None:
        """Bring the weights, now that they hold values, into the form that is multiplied fastest."""
        self.lm_head.prepare()
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.prepare()

    def forward(self, batch: Batch, caches: LayerCaches, ops: Ops) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` after the last norm; keys and values go into `caches`."""
        config = self.config
        eps, scale = config.rms_norm_eps, config.head_dim**-0.5
        residual = self.embedding.rows(batch.token_ids)
        out = residual.new_empty(len(residual), config.num_heads, config.head_dim)
        inputs = AttentionInput(batch, caches, self.cos_sin, scale, ops, out)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            self.on_layer()
            if index:
                x = ops.rms_norm(x, layer.input_norm, eps, residual)
            x = self._attention(index, layer, x, inputs)
            x = ops.rms_norm(x, layer.post_norm, eps, residual)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
        return ops.rms_norm(x, self.norm, eps, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]` → `[rows, vocab_size]`, in the model's dtype."""
        return self.lm_head(hidden)

    def _attention(self, index: int, layer: Layer, x: Tensor, inputs: AttentionInput) -> Tensor:
        config, ops = self.config, inputs.ops
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, size)
        query, key, value = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = _norm_heads(query, layer.query_norm, config.rms_norm_eps, ops)
            key = _norm_heads(key, layer.key_norm, config.rms_norm_eps, ops)
        attended = attend(index, query, key, value, inputs, layer.window)
        return layer.out(attended.view(-1, heads * size))


def _norm_heads(heads: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
    return ops.rms_norm(heads.reshape(-1, heads.shape[-1]), weight, eps).view(heads.shape)


def _layer(weights: Weights, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads * size, config.num_kv_heads * size

    def norm(name: str, length: int) -> Tensor:
        return weights.vector({f"{prefix}{name}.weight": length})

    def linear(outputs: Mapping[str, int], columns: int) -> Linear:
        rows = {prefix + name: count for name, count in outputs.items()}
        biases = {f"{name}.bias": count for name, count in rows.items()}
        matrix = weights.matrix({f"{name}.weight": count for name, count in rows.items()}, columns)
        return Linear(matrix, weights.vector(biases) if any(map(weights.has, biases)) else None)

    per_head = config.architecture == "qwen3"
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(
            {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}, hidden
        ),
        query_norm=norm("self_attn.q_norm", size) if per_head else None,
        key_norm=norm("self_attn.k_norm", size) if per_head else None,
        out=linear({"self_attn.o_proj": hidden}, heads),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(
            {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}, hidden
        ),
        down=linear({"mlp.down_proj": hidden}, config.intermediate_size),
        window=config.sliding_windows[index],
    )


def log_progress(done: int, total: int) -> None:
    log.debug("loaded %d of %d million values", done // 1_000_000, total // 1_000_000)


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress = log_progress,
) -> Model:
    """Load a Hugging Face folder or a GGUF file. Raises ModelError: what was found, what is supported."""
    device = torch.device(device)
    source: Source = open_source(path)
    chosen = resolve_dtype(dtype, device)
    with ThreadPoolExecutor(1, "fingerprint") as hasher, torch.inference_mode():
        digest = hasher.submit(fingerprint, source.files)
        weights = Weights(source, chosen, device)
        model = Model(weights, chosen, device)
        weights.fill(progress, threads=len(os.sched_getaffinity(0)))
        model.prepare()
        model.fingerprint = digest.result()
    return model
