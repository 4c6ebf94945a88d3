"""Build a `tokenizers` tokenizer from the metadata of a GGUF file.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it, so each supported name is
spelt out here, as the model families' own `tokenizer.json` files have it. An unknown one is refused: a near
miss would split text in ways that the model never saw.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from services.text.model_files import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _llama3() -> PreTokenizer:
    return _split(_WORDS % "{1,3}")


def _qwen2() -> PreTokenizer:
    return _split(_WORDS % "")


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}
"""`tokenizer.ggml.pre` → how text is split before merging. `default` is GPT-2's rule."""

_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # these put text into Unicode's composed form (NFC) first
_WHOLE_WORDS = ("llama-bpe",)  # a word that is in the vocabulary is taken whole, whatever the merges say
_BOS_BY_DEFAULT = ("llama-bpe",)


def build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer with the file's vocabulary, special tokens and BOS/EOS rules. Raises ModelError."""
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ModelError(f"tokenizer.ggml.model is {model!r}; supported are {', '.join(builders)}")
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        raise ModelError("tokenizer.ggml.tokens is missing: the file holds no vocabulary")
    return builders[model](metadata)


def _byte_level(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = tokenizers.Tokenizer(BPE(_vocabulary(metadata), merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, metadata, add_bos=pre in _BOS_BY_DEFAULT)


def _sentencepiece(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Scored pieces (Llama 2, Mistral): the best-scored merge first, bytes for what is in no piece."""
    vocabulary = _vocabulary(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = list(scored_merges(metadata))
    tokenizer = tokenizers.Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return _finish(tokenizer, metadata, add_bos=True)


def scored_merges(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every way to join two pieces into a third, best-scored result first: SentencePiece's order."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores is missing or not as long as tokenizer.ggml.tokens")
    kinds = _kinds(metadata)
    normal = {token: id for id, token in enumerate(tokens) if kinds[id] == NORMAL}
    for token, _ in sorted(normal.items(), key=lambda item: (-scores[item[1]], item[1])):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in normal and pair[1] in normal]
        yield from sorted(known, key=lambda pair: (normal[pair[0]], normal[pair[1]]))


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _kinds(metadata: dict[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    return kinds


def _finish(tokenizer: tokenizers.Tokenizer, metadata: dict[str, Any], add_bos: bool) -> tokenizers.Tokenizer:
    """Mark control and user-defined tokens; add BOS and EOS where the file (or its family) wants them."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], _kinds(metadata)
    marked = {kind: [tokens[id] for id, found in enumerate(kinds) if found == kind] for kind in set(kinds)}
    control = marked.get(CONTROL, []) + marked.get(UNKNOWN, [])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in marked.get(USER_DEFINED, [])])
    wanted = [("bos", add_bos), ("eos", False)]
    ends = [_end(name, default, metadata) for name, default in wanted]
    if any(ends):
        template = [*ends[0], "$A", *ends[1]]
        pairs = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends[0] + ends[1])]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    return tokenizer


def _end(name: str, default: bool, metadata: dict[str, Any]) -> list[str]:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    wanted = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    return [metadata["tokenizer.ggml.tokens"][id]] if wanted and id is not None else []
