"""Tokenizers that several tests share, and small ones made on the spot."""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import tokenizers

from services.text.gguf_metadata import read_metadata
from services.text.model_source import packaged_model
from services.text.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer


@cache
def packaged_metadata() -> dict[str, Any]:
    return read_metadata(packaged_model())


@cache
def packaged_tokenizer() -> Tokenizer:
    return load_tokenizer(packaged_model())


def sentencepiece_metadata(pieces: list[str], **more: Any) -> dict[str, Any]:
    """A `llama`-type vocabulary: unknown, BOS, EOS, the 256 bytes, then `pieces`, best first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    metadata = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1}
    metadata |= {"eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **more}.items()}


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: str) -> Path:
    """A model folder with `tokenizer.json` and further files (`config_json=…` is config.json)."""
    backend.save(str(folder / "tokenizer.json"))
    for name, text in files.items():
        stem, suffix = name.rsplit("_", 1)
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, TokenizerFacts())


def write_gguf(path: Path, values: dict[str, Any]) -> Path:
    """A GGUF file with `values` as its metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        adders = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        adders[type(value)](key, value)
    writer.add_float32("test.ratio", 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
