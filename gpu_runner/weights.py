"""Weights: from safetensors or GGUF into (fused) tensors of the wanted dtype, filled by threads.

A model first asks for its tensors by their Hugging Face names (`matrix`, `vector`), which only allocates;
`fill` then reads, dequantises and converts everything in pieces of a million values, so that no second copy
of the weights ever exists, all cores work, and progress can be shown.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from gpu_runner.gguf_file import GgufFile
from gpu_runner.model_config import ModelConfig, ModelError, default_eos, from_gguf, from_hf

PIECE_VALUES = 1 << 20  # values converted at once by a thread: bounds the memory beside the weights

Progress = Callable[[int, int], None]
"""Called with (values loaded, values in all)."""

_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Source(Protocol):
    """Where tensors come from; names are those of Hugging Face checkpoints."""

    path: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    files: tuple[Path, ...]  # what the fingerprint covers
    rope_factors: Tensor | None  # [head_dim / 2], divide the rotary frequencies

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a matrix (or entries of a vector)."""
        ...


class SafetensorsSource:
    """A Hugging Face folder: `config.json` and one or many safetensors files."""

    rope_factors: Tensor | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        config = _read_json(path / "config.json")
        self.config = from_hf(config)
        generation = path / "generation_config.json"
        self.eos_token_ids = default_eos(config, _read_json(generation) if generation.exists() else {})
        weights = sorted(path.glob("*.safetensors"))
        index = path / "model.safetensors.index.json"
        if index.exists():
            weights = sorted({path / name for name in _read_json(index)["weight_map"].values()})
        missing = [file.name for file in weights if not file.exists()]
        if missing or not weights:
            raise ModelError(
                f"{path} lacks {', '.join(missing) or 'safetensors files'}; other formats are not supported"
            )
        self.files = (path / "config.json", *weights)
        self._slices: dict[str, Any] = {}
        for file in weights:
            handle: Any = safe_open(file, framework="pt")
            self._slices.update((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._slices.get(name)
        return None if found is None else tuple(found.get_shape())

    def read(self, name: str, first: int, last: int) -> Tensor:
        values: Tensor = self._slices[name][first:last]
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(f"tensor {name} is {values.dtype}; supported are float32, float16 and bfloat16")
        return values


class GgufSource:
    """A GGUF file. Llama files hold Q and K with rotary pairs side by side; `read` puts the halves back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[Path, ...] = (path,)
        self._file = GgufFile(path)
        self._tensors = {_hugging_face_name(name): item for name, item in self._file.tensors.items()}
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelError(f"{path} has no tensor token_embd.weight: not a language model")
        metadata = self._file.metadata
        self.config = from_gguf(metadata, embedding.rows, tied="lm_head.weight" not in self._tensors)
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        self.eos_token_ids = tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
        factors = self._file.tensors.get("rope_freqs.weight")
        self.rope_factors = None if factors is None else torch.from_numpy(self._file.values(factors)[0])

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._tensors.get(name)
        if found is None:
            return None
        return (found.columns,) if _is_vector(name) else (found.rows, found.columns)

    def read(self, name: str, first: int, last: int) -> Tensor:
        tensor = self._tensors[name]
        if _is_vector(name):
            return self._unpermuted(name, torch.from_numpy(self._file.values(tensor)[0]))[first:last]
        if self._heads(name):
            return self._unpermuted(name, torch.from_numpy(self._file.values(tensor)))[first:last]
        return torch.from_numpy(self._file.values(tensor, first, last))

    def _heads(self, name: str) -> int:
        """The number of heads of a tensor whose rows are permuted; else 0."""
        if self.config.architecture != "llama":
            return 0
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        return heads.get(name.split(".")[-2], 0)

    def _unpermuted(self, name: str, values: Tensor) -> Tensor:
        heads = self._heads(name)
        if not heads:
            return values
        pairs = values.view(heads, self.config.head_dim // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(values.shape)


def open_source(path: str | Path) -> Source:
    """A folder or a `.gguf` file. Raises ModelError for what cannot be loaded."""
    path = Path(path)
    if path.is_dir() and (path / "config.json").exists():
        return SafetensorsSource(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    found = "a folder without config.json" if path.is_dir() else "a file" if path.is_file() else "nothing"
    raise ModelError(
        f"model {path}: found {found}; want a folder with config.json and safetensors, or a .gguf file"
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    first: int
    last: int
    target: Tensor


class Weights:
    """The tensors that a model asked for; empty until `fill`."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self._dtype = dtype
        self._device = device
        self._pieces: list[_Piece] = []

    def has(self, name: str) -> bool:
        return self.source.shape(name) is not None

    def matrix(self, shapes: Mapping[str, int], columns: int) -> Tensor:
        """Matrices below each other: `shapes` is name → rows. Raises ModelError for a missing or odd one."""
        fused = self._empty(sum(shapes.values()), columns)
        row = 0
        for name, rows in shapes.items():
            self._want(name, (rows, columns), fused[row : row + rows])
            row += rows
        return fused

    def vector(self, shapes: Mapping[str, int]) -> Tensor:
        """Vectors one after the other: `shapes` is name → length."""
        fused = self._empty(sum(shapes.values()))
        start = 0
        for name, length in shapes.items():
            self._want(name, (length,), fused[start : start + length])
            start += length
        return fused

    def fill(self, progress: Progress, threads: int) -> None:
        """Read everything that was asked for, the largest pieces first."""
        total, done = sum(piece.target.numel() for piece in self._pieces), 0
        self._pieces.sort(key=lambda piece: -piece.target.numel())
        with ThreadPoolExecutor(threads, "weights") as pool:
            for count in pool.map(self._fill_piece, self._pieces):
                done += count
                progress(done, total)
        self._pieces.clear()

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _want(self, name: str, shape: tuple[int, ...], target: Tensor) -> None:
        found = self.source.shape(name)
        if found != shape:
            words = "is missing" if found is None else f"has the shape {list(found)}"
            raise ModelError(f"tensor {name} of {self.source.path} {words}; the config wants {list(shape)}")
        step = max(1, PIECE_VALUES // (shape[1] if len(shape) == 2 else 1))
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            self._pieces.append(_Piece(name, first, last, target[first:last]))

    def _fill_piece(self, piece: _Piece) -> int:
        with torch.inference_mode():
            piece.target.copy_(self.source.read(piece.name, piece.first, piece.last))
        return piece.target.numel()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; want a JSON object")
    return content


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _GGUF_NAMES:
        return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
    return name


def _is_vector(name: str) -> bool:
    return name.endswith(("norm.weight", ".bias"))
