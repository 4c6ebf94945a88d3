"""Tokenizers from GGUF metadata and from tokenizer.json, against naive encoders and the library's decode."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from kvmanager.errors import PagekeeperError
from services.text import gguf_tokenizer
from services.text.model_files import ModelError
from services.text.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer
from tests.services.tokenizer_samples import (
    packaged_metadata,
    packaged_tokenizer,
    sentencepiece_metadata,
    tokenizer_of,
    write_folder,
    write_gguf,
)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "aa", "▁▁", "é", "aaa"]
TRICKY = ["👩‍👩‍👧 e\u0301 漢字 ١٢٣ Ⅷ½", "\r\n\t  \x00\x7f  ", "don't 2024 x=1_000;", "🏳️‍🌈🎉"]


@cache
def byte_of() -> dict[str, int]:
    """GPT-2's table, found by asking the library how it writes each byte that UTF-8 can hold."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = sorted(set(range(256)) - visible)
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


@cache
def smollm_tables() -> tuple[dict[bytes, int], dict[tuple[bytes, bytes], int]]:
    def unwritten(token: str) -> bytes:
        return bytes(byte_of()[char] for char in token)

    tokens = packaged_metadata()["tokenizer.ggml.tokens"]
    kinds = packaged_metadata()["tokenizer.ggml.token_type"]
    ids = {unwritten(token): id for id, token in enumerate(tokens) if kinds[id] == 1}
    merges = [merge.split(" ") for merge in packaged_metadata()["tokenizer.ggml.merges"]]
    return ids, {(unwritten(left), unwritten(right)): rank for rank, (left, right) in enumerate(merges)}


def naive_smollm(text: str) -> list[int]:
    """SmolLM2's encoding by definition: single digits, GPT-2's words, then the lowest-ranked merge first."""
    ids, ranks = smollm_tables()
    found = []
    for run in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(GPT2_WORDS, run):
            parts = [bytes([byte]) for byte in word.encode() if bytes([byte]) in ids]
            while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
                best, at = min(pairs, key=ranks.__getitem__), 0
                while at < len(parts) - 1:
                    if (parts[at], parts[at + 1]) == best:
                        parts[at : at + 2] = [parts[at] + parts[at + 1]]
                    at += 1
            found += [ids[part] for part in parts]
    return found


def naive_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's encoding by its definition: join the best-scored neighbours until none is left."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: id for id, token in enumerate(tokens)}
    normal = {
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1
    }
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        places = [at for at in range(len(parts) - 1) if parts[at] + parts[at + 1] in normal]
        if not places:
            break
        at = max(places, key=lambda at: (scores[ids[parts[at] + parts[at + 1]]], -at))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelt = [[part] if part in normal else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [ids[token] for tokens in spelt for token in tokens]


def missing_bytes() -> set[int]:
    """Bytes without a token in SmolLM2's vocabulary: some controls, and what no assigned character needs."""
    return set(range(256)) - {token[0] for token in smollm_tables()[0] if len(token) == 1}


def test_known_encodings_of_smollm2() -> None:
    tokenizer = packaged_tokenizer()
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("2024") == tokenizer.encode("2") + tokenizer.encode("0") + tokenizer.encode("24")
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert tokenizer.named_tokens["eos_token"] == "<|im_end|>"


def test_special_tokens_are_left_out_on_request_only() -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"


def test_a_part_of_a_character_is_shown_as_bytes() -> None:
    tokenizer = packaged_tokenizer()
    ids = tokenizer.encode("🎉")
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == "🎉".encode()
    assert "\ufffd" in tokenizer.token_text(ids[0])
    assert tokenizer.token_text(tokenizer.encode(" world")[0]) == " world"


def test_ids_outside_the_vocabulary_have_no_text_and_are_refused_by_number() -> None:
    tokenizer = packaged_tokenizer()
    assert tokenizer.decode([49152]) == ""
    tokenizer.check_token_ids([0, 49151])
    with pytest.raises(PagekeeperError, match=r"49152.*0 to 49151"):
        tokenizer.check_token_ids([5, 49152])
    with pytest.raises(PagekeeperError, match="-1"):
        tokenizer.check_token_ids([-1])


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(PagekeeperError, match="surrogate"):
        packaged_tokenizer().encode("a\ud83d")


@given(st.text(max_size=60) | st.text("a1 '\nte²Ⅷ\u00a0", max_size=60))
@example(TRICKY[0])
@example(TRICKY[1])
@example(TRICKY[2])
@example(TRICKY[3])
def test_smollm2_encodes_as_its_definition_says(text: str) -> None:
    assert packaged_tokenizer().encode(text) == naive_smollm(text)


@given(st.text(max_size=60))
@example(" ".join(TRICKY))
def test_text_comes_back(text: str) -> None:
    tokenizer = packaged_tokenizer()
    lost = missing_bytes()
    kept = bytes(byte for byte in text.encode() if byte not in lost)
    assert tokenizer.decode(tokenizer.encode(text)) == kept.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_decoding_is_the_librarys(ids: list[int], skip: bool) -> None:
    tokenizer = packaged_tokenizer()
    library = gguf_backend()
    assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@cache
def gguf_backend() -> tokenizers.Tokenizer:
    return gguf_tokenizer.build(packaged_metadata())


# --- other GGUF vocabularies ------------------------------------------------------------------------------


def byte_level_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    """All bytes, three merges and two marked tokens."""
    tokens = [*sorted(byte_of(), key=byte_of().__getitem__), "ab", "Ġab", "12", "123", "<|end|>", "<tool>"]
    kinds = [1] * 260 + [3, 4]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "bos_token_id": 260}
    metadata |= {"eos_token_id": 260, "merges": ["a b", "Ġ ab", "1 2"]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **more}.items()}


def encoded(pre: str, text: str, **more: Any) -> list[str]:
    backend = gguf_tokenizer.build(byte_level_metadata(pre, **more))
    return [str(token) for token in backend.encode(text).tokens]


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "ab123 ab", ["ab", "12", "3", "Ġab"]),
        ("default", "ab123 ab", ["ab", "12", "3", "Ġab"]),
        ("smollm", "ab123 ab", ["ab", "1", "2", "3", "Ġab"]),
        ("qwen2", "ab123 ab", ["ab", "1", "2", "3", "Ġab"]),
        ("llama-bpe", "ab1231 ab", ["<|end|>", "ab", "123", "1", "Ġab"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_family_does(pre: str, text: str, tokens: list[str]) -> None:
    assert encoded(pre, text) == tokens


def test_bos_and_eos_come_where_the_file_wants_them() -> None:
    assert encoded("llama-bpe", "ab", add_bos_token=False) == ["ab"]
    assert encoded("gpt-2", "ab", add_bos_token=True, add_eos_token=True) == ["<|end|>", "ab", "<|end|>"]


def test_qwen2_composes_characters_first() -> None:
    assert encoded("qwen2", "e\u0301") == encoded("qwen2", "é")


@given(st.text(max_size=60))
@example(" ".join(TRICKY))
def test_qwen2_encodes_as_in_transformers(text: str) -> None:
    ours, theirs = qwen2_backends()
    assert ours.encode(text).ids == theirs.encode(text).ids


@cache
def qwen2_backends() -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Qwen2's rules over SmolLM2's vocabulary: ours, and transformers' own."""
    metadata = {**packaged_metadata(), "tokenizer.ggml.pre": "qwen2"}
    vocabulary = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token=None)
    return gguf_tokenizer.build(metadata), theirs.backend_tokenizer


def test_a_file_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: tokenizer\.ggml\.model is None"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", {}))


def test_user_defined_tokens_are_parsed_but_not_special() -> None:
    tokenizer = tokenizer_of(gguf_tokenizer.build(byte_level_metadata("gpt-2")))
    ids = tokenizer.encode("ab<tool>ab<|end|>")
    assert ids == [256, 261, 256, 260]
    assert tokenizer.decode(ids) == "ab<tool>ab"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pre", "tekken", "'tekken'.*supported are default, gpt-2, smollm"),
        ("pre", None, "None.*supported"),
        ("model", "bert", "'bert'.*gpt2, llama"),
        ("tokens", None, "vocabulary"),
        ("token_type", [1], "1 entries for 262 tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_tokenizer.build({**byte_level_metadata("gpt-2"), f"tokenizer.ggml.{key}": value})


def test_pieces_without_scores_are_refused() -> None:
    with pytest.raises(ModelError, match="scores"):
        gguf_tokenizer.build(sentencepiece_metadata(PIECES, scores=[0.0]))


@given(st.text("abc é🎉", max_size=30))
@example("aaaa")
@example(" abc")
def test_sentencepiece_encodes_as_its_definition_says(text: str) -> None:
    metadata = sentencepiece_metadata(PIECES)
    tokenizer = tokenizer_of(sentencepiece_backend())
    assert tokenizer.encode(text, add_special_tokens=False) == naive_sentencepiece(text, metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@cache
def sentencepiece_backend() -> tokenizers.Tokenizer:
    return gguf_tokenizer.build(sentencepiece_metadata(PIECES))


def test_sentencepiece_adds_bos_and_no_space_where_the_file_says_so() -> None:
    backend = gguf_tokenizer.build(sentencepiece_metadata(PIECES, add_space_prefix=False))
    assert backend.encode("ab ab").tokens == ["<s>", "ab", "▁ab"]
    assert tokenizer_of(backend).decode(backend.encode(" ab").ids) == " ab"


# --- folders ----------------------------------------------------------------------------------------------


def small_backend() -> tokenizers.Tokenizer:
    backend = gguf_tokenizer.build(byte_level_metadata("gpt-2"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 260)]
    )
    return backend


def test_a_folder_says_its_tokens_and_template(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|end|>"}, "eos_token": "<|end|>", "chat_template": "T"}
    folder = write_folder(
        tmp_path,
        small_backend(),
        config_json=json.dumps({"eos_token_id": 7}),
        generation_config_json=json.dumps({"eos_token_id": [260, 5]}),
        tokenizer_config_json=json.dumps(config),
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (260, 5))
    assert (tokenizer.chat_template, tokenizer.named_tokens["bos_token"]) == ("T", "<|end|>")
    assert tokenizer.encode("ab") == [260, 256]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]


def test_a_template_file_comes_before_the_configs(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": "other"})
    write_folder(tmp_path, small_backend(), tokenizer_config_json=config, chat_template_jinja="mine")
    assert load_tokenizer(tmp_path).chat_template == "mine"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    config = json.dumps({"chat_template": templates})
    write_folder(tmp_path, small_backend(), tokenizer_config_json=config)
    assert load_tokenizer(tmp_path).chat_template == "d"


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_folder(tmp_path, small_backend())).chat_template is None


def test_limits_left_in_a_tokenizer_file_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert load_tokenizer(write_folder(tmp_path, backend)).encode("abcabc", add_special_tokens=False) == [
        *(256, 99, 256, 99)
    ]


def test_missing_and_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer that can be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no model at"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip("x", 1, 0)])
def test_decoders_that_cannot_be_streamed_are_refused(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(backend, TokenizerFacts())


@given(st.lists(st.integers(0, 263), max_size=20), st.booleans())
def test_added_tokens_decode_as_in_the_library(ids: list[int], skip: bool) -> None:
    backend = added_backend()
    assert tokenizer_of(backend).decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@cache
def added_backend() -> tokenizers.Tokenizer:
    """Bytes, and added tokens that are not written in the byte alphabet."""
    backend = tokenizers.Tokenizer(BPE(byte_of(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([" two words ", "漢字", "<think>", "é", "▁", "<0x41>"])
    backend.add_special_tokens([AddedToken("<|x|>", special=True)])
    return backend
