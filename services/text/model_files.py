"""What the frontend must know of a model beside its tokenizer: name, longest context, what ends a text.

A model is a Hugging Face folder (`config.json`, perhaps `generation_config.json`) or a GGUF file.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.text.gguf_metadata import read_metadata

MAX_JSON_BYTES = 256 * 1024 * 1024
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_QUANTISATION = re.compile(r"[.-](?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


class ModelError(ValueError):
    """A model cannot be found, read or served; the message says what was found and what would do."""


@dataclass(frozen=True)
class ModelFacts:
    """`max_model_len`: tokens of prompt and output together. `eos_token_ids`: each of them ends a text."""

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def model_facts(path: Path) -> ModelFacts:
    """A folder's or a GGUF file's facts. Raises ModelError (GGUFError, OSError for broken files)."""
    return _gguf_facts(path) if is_gguf(path) else _folder_facts(path)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file; a folder is not. Raises ModelError when it is neither."""
    if path.is_dir():
        return False
    if not path.is_file():
        raise ModelError(
            f"no model at {path}: want a folder with config.json and tokenizer.json, or a .gguf file"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file (it starts with {magic!r}); want a GGUF file or a model folder"
        )
    return True


def public_name(path: Path) -> str:
    """The name that clients see: `org/name` of a hub snapshot, else the path's end less quantisation."""
    for parent in (path, *path.parents):
        if parent.name.startswith("models--") and parent != path:
            return parent.name.removeprefix("models--").replace("--", "/")
    if path.suffix.lower() != ".gguf":
        return path.resolve().name
    return _QUANTISATION.sub("", _SHARD.sub("", path.stem)) or path.stem


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file. Raises ModelError on anything else."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; want a JSON object")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """`None`, one id or a list of ids → ids, without repeats."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int) and item >= 0))


def gguf_eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message: each of them ends a reply."""
    return token_ids([metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_END_KEYS])


def folder_eos_ids(folder: Path) -> tuple[int, ...]:
    """`generation_config.json` decides where it says so, as in transformers; else `config.json`."""
    for file in ("generation_config.json", "config.json"):
        ids = token_ids(read_json(folder / file).get("eos_token_id"))
        if ids:
            return ids
    return ()


def _gguf_facts(path: Path) -> ModelFacts:
    metadata = read_metadata(path)
    key = f"{metadata.get('general.architecture')}.context_length"
    return ModelFacts(public_name(path), _length(metadata.get(key), key, path), gguf_eos_ids(metadata))


def _folder_facts(folder: Path) -> ModelFacts:
    config = read_json(folder / "config.json")
    if not config:
        raise ModelError(f"no config.json in {folder}: want a Hugging Face model folder, or a .gguf file")
    key = "max_position_embeddings"
    return ModelFacts(public_name(folder), _length(config.get(key), key, folder), folder_eos_ids(folder))


def _length(value: Any, key: str, path: Path) -> int:
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path} has {key}={value!r}; want the number of tokens that the model takes")
    return value
