"""Reading GGUF: every type against its definition, what is passed over, and what is refused."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu_runner.gguf_file import SUPPORTED_TYPES, GgufFile
from gpu_runner.model_config import ModelError
from gpu_runner.weights import GgufSource
from tests.gpu_runner.gguf_support import write_gguf

# --- what each type means, one value at a time, written down from ggml's block structures ------------


def half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def q8_0(block: bytes) -> list[float]:
    scale = half(block[:2])
    return [scale * value for value in struct.unpack("<32b", block[2:34])]


def nibbles(data: bytes) -> list[int]:
    """The low halves of all bytes, then the high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q4_0(block: bytes) -> list[float]:
    scale = half(block[:2])
    return [scale * (value - 8) for value in nibbles(block[2:18])]


def q4_1(block: bytes) -> list[float]:
    scale, lowest = half(block[:2]), half(block[2:4])
    return [scale * value + lowest for value in nibbles(block[4:20])]


def q4_k(block: bytes) -> list[float]:
    """256 values: 8 groups of 32, each with a 6-bit scale and a 6-bit minimum, packed into 12 bytes."""
    scale, low, packed, quants = half(block[:2]), half(block[2:4]), block[4:16], block[16:144]
    values = []
    for group in range(8):
        if group < 4:
            factor, offset = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4
            offset = packed[group + 4] >> 4 | (packed[group] >> 6) << 4
        part = quants[group // 2 * 32 : group // 2 * 32 + 32]
        values += [scale * factor * (byte >> 4 * (group % 2) & 15) - low * offset for byte in part]
    return values


def q6_k(block: bytes) -> list[float]:
    """256 values: low 4 bits, high 2 bits, a signed 8-bit scale per 16 values, one half-precision scale."""
    low, high, scales, scale = (
        block[:128],
        block[128:192],
        struct.unpack("<16b", block[192:208]),
        half(block[208:210]),
    )
    values = []
    for index in range(256):
        part, place = divmod(index, 128)
        quarter, column = divmod(place, 32)
        four = low[64 * part + column + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
        two = high[32 * part + column] >> 2 * quarter & 3
        values.append(scale * scales[index // 16] * ((four | two << 4) - 32))
    return values


def plain(form: str) -> Callable[[bytes], list[float]]:
    return lambda block: [float(value) for value in struct.unpack(form, block)]


def bf16(block: bytes) -> list[float]:
    return [float(struct.unpack("<f", b"\0\0" + block)[0])]


DEFINITIONS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": plain("<f"),
    "F16": plain("<e"),
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}
HALVES = {"F16": [0], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}


def random_blocks(kind: str, count: int) -> np.ndarray:
    """Random bytes, with finite numbers where a block holds floats."""
    generator = np.random.default_rng(len(kind))
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for place in HALVES.get(kind, []):
        numbers = generator.normal(size=(count, 1)).astype(np.float16)
        blocks[:, place : place + 2] = numbers.view(np.uint8)
    if kind == "F32":
        blocks = generator.normal(size=(count, 1)).astype(np.float32).view(np.uint8)
    if kind == "BF16":
        blocks = generator.normal(size=(count, 1)).astype(np.float32).view(np.uint8)[:, 2:]
    return np.ascontiguousarray(blocks)


def test_definitions_cover_what_is_supported() -> None:
    assert set(DEFINITIONS) == set(SUPPORTED_TYPES)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_values_are_those_of_the_definition(kind: str, tmp_path: Path) -> None:
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    per_row = 512 // values
    blocks = random_blocks(kind, 6 * per_row)
    write_gguf(tmp_path / "m.gguf", {"t": (kind, blocks.reshape(6, per_row * size))}, {}, "llama")
    file = GgufFile(tmp_path / "m.gguf")
    found = file.values(file.tensors["t"])
    wanted = np.array([DEFINITIONS[kind](block.tobytes()) for block in blocks]).reshape(6, 512)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(file.values(file.tensors["t"], 2, 5), found[2:5])


def test_metadata_keeps_short_values_and_passes_over_vocabularies(tmp_path: Path) -> None:
    fields = {
        "a.text": "naïve",
        "a.tokens": [f"token {index}" for index in range(500)],
        "a.numbers": list(range(500)),
        "a.few": [1, 2, 3],
        "a.float": 0.5,
    }
    write_gguf(tmp_path / "m.gguf", {"t": ("F32", random_blocks("F32", 8).reshape(2, 16))}, fields, "llama")
    found = GgufFile(tmp_path / "m.gguf")
    assert {key: found.metadata[key] for key in fields} == {**fields, "a.tokens": None, "a.numbers": None}
    assert found.tensors["t"].rows == 2


def test_unsupported_gguf_type_is_named(tmp_path: Path) -> None:
    data = np.zeros((2, 24), np.uint8)
    write_gguf(tmp_path / "m.gguf", {"t": ("Q5_1", data)}, {}, "llama")
    with pytest.raises(ModelError, match=r"tensor t of .* has the type Q5_1; supported are F32, F16"):
        GgufFile(tmp_path / "m.gguf")


def test_broken_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" * 20)
    with pytest.raises(ModelError, match="is not a GGUF file: it begins with b'PK"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelError, match="GGUF version 1; supported are 2 and 3"):
        GgufFile(path)
    write_gguf(path, {"t": ("F32", random_blocks("F32", 4096).reshape(64, 256))}, {}, "llama")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="is cut off: tensor t ends beyond"):
        GgufFile(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ModelError, match="is cut off in its header"):
        GgufFile(path)


def test_gguf_without_embedding_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"t": ("F32", random_blocks("F32", 4).reshape(1, 16))}, {}, "llama")
    with pytest.raises(ModelError, match=r"has no tensor token_embd.weight"):
        GgufSource(tmp_path / "m.gguf")
