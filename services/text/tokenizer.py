"""Text to token ids and back, for a Hugging Face folder (`tokenizer.json`) or a GGUF file.

Decoding is by bytes: each token stands for some bytes of UTF-8, whatever tokens are around it. So streamed
and unstreamed text cannot differ, and one token costs one dictionary lookup.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from kvmanager.errors import PagekeeperError
from services.text import gguf_tokenizer
from services.text.gguf_metadata import read_metadata
from services.text.model_files import ModelError, folder_eos_ids, gguf_eos_ids, is_gguf, read_json, token_ids

_TEMPLATE_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_PLAIN_DECODERS = ("Replace", "ByteFallback", "Fuse", "Strip")


@dataclass(frozen=True)
class TokenizerFacts:
    """What a model says of its tokens beside the vocabulary. `named_tokens`: `bos_token` … for templates."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """Encodes and decodes; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes = _TokenBytes(backend)
        self.strips_leading_space = self._bytes.strips_leading_space
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_token_id = facts.bos_token_id
        self.eos_token_ids = facts.eos_token_ids
        self.chat_template = facts.chat_template
        self.named_tokens = facts.named_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in `text` become those tokens; BOS and EOS come on request.

        Raises PagekeeperError where `text` is no Unicode text (a lone surrogate).
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            message = "the text holds a lone surrogate (half of a character), which is not Unicode; remove it"
            raise PagekeeperError("invalid_request", message) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 come out as U+FFFD. Unknown ids have no text."""
        skipped: Iterable[int] = self.special_ids if skip_special_tokens else ()
        text = b"".join([self._bytes[id] for id in ids if id not in skipped]).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for, perhaps a part of a character. Special tokens have their name."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """A token alone, as text; U+FFFD for parts of characters."""
        return self._bytes[id].decode("utf-8", "replace")

    def check_token_ids(self, ids: Sequence[int]) -> None:
        """Raises PagekeeperError unless every id is one of the vocabulary's."""
        wrong = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            message = f"token id {wrong} is not in the vocabulary; want 0 to {self.vocab_size - 1}"
            raise PagekeeperError("invalid_request", message)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a folder's or a GGUF file's tokenizer. Raises ModelError (GGUFError, OSError for broken files)."""
    path = Path(path)
    return _from_gguf(path) if is_gguf(path) else _from_folder(path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    gguf_names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in gguf_names.items()}
    named = {name: tokens[id] for name, id in ids.items() if id is not None and id < len(tokens)}
    facts = TokenizerFacts(
        ids["bos_token"], gguf_eos_ids(metadata), metadata.get("tokenizer.chat_template"), named
    )
    try:
        return Tokenizer(gguf_tokenizer.build(metadata), facts)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"no tokenizer.json in {folder}; save one with the model (AutoTokenizer.save_pretrained)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} is not a tokenizer that can be read: {error}") from None
    config = read_json(folder / "tokenizer_config.json")
    named = _named_tokens({**read_json(folder / "special_tokens_map.json"), **config})
    bos, eos = (
        backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token")
    )
    eos_ids = token_ids([*folder_eos_ids(folder), eos])
    return Tokenizer(backend, TokenizerFacts(bos, eos_ids, _folder_template(folder, config), named))


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Tokens are given as text or as {"content": text, …}."""
    values = {name: config.get(name) for name in _TEMPLATE_TOKENS}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` first, as in transformers, then the JSON files; of several the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


class _TokenBytes(dict[int, bytes]):
    """Token id → bytes, filled as tokens turn up. It holds at most the vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token = backend.id_to_token
        parts = _decoder_parts(backend)
        kinds = [part["type"] for part in parts]
        self._byte_level = kinds == ["ByteLevel"]
        self._spaces = [part for part in parts if part["type"] == "Replace"]
        self.strips_leading_space = "Strip" in kinds
        self._byte_fallback = "ByteFallback" in kinds

    def __missing__(self, id: int) -> bytes:
        token = self._token(id)
        if token is None:
            return b""
        self[id] = self._decode(token)
        return self[id]

    def _decode(self, token: str) -> bytes:
        if self._byte_level:
            known = all(char in _BYTE_OF for char in token)
            return bytes(_BYTE_OF[char] for char in token) if known else token.encode()
        for part in self._spaces:
            token = token.replace(part["pattern"]["String"], part["content"])
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.encode()


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps. Raises ModelError where a step's output depends on more than its own token."""
    if backend.decoder is None:
        raise ModelError("the tokenizer has no decoder; supported are ByteLevel and SentencePiece-like ones")
    decoder = json.loads(backend.decoder.__getstate__())
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds != ["ByteLevel"] and not all(_is_plain(part) for part in parts):
        message = f"the tokenizer's decoder is {' + '.join(kinds)}; supported are ByteLevel, and sequences of"
        raise ModelError(f"{message} {', '.join(_PLAIN_DECODERS)} (of one leading space)")
    return parts


def _is_plain(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return "String" in part["pattern"]
    if part["type"] == "Strip":
        return (part["content"], part["start"], part["stop"]) == (" ", 1, 0)
    return part["type"] in _PLAIN_DECODERS


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: a visible Latin-1 character is itself, the others follow from U+0100 in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


_BYTE_OF = _byte_alphabet()
