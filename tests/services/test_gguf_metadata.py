"""The metadata reader against files that the `gguf` package writes, and against broken ones."""

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text.gguf_metadata import GGUFError, read_metadata
from services.text.model_source import packaged_model
from tests.services.tokenizer_samples import write_gguf

VALUES = {
    "test.text": "naïve 🎉",
    "test.flag": True,
    "test.count": 70000,
    "test.texts": ["", "a", "漢字"],
    "test.numbers": [1, 2, 3],
    "test.flags": [True, False],
    "test.lists": [[1, 2], [3]],
}


def test_values_come_back_as_written(tmp_path: Path) -> None:
    metadata = read_metadata(write_gguf(tmp_path / "m.gguf", VALUES))
    assert metadata == {"general.architecture": "llama", "test.ratio": 0.5, **VALUES}


def test_the_packaged_model_reads_as_with_the_gguf_package() -> None:
    reader = gguf.GGUFReader(packaged_model())
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_metadata(packaged_model()) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF"),
        (b"PK\x03\x04 and so on", "starts with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "metadata keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 40), "array of"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQQ", 9, 8, 1, 9),
            "inside a string",
        ),
    ],
)
def test_broken_files_are_refused_with_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        read_metadata(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", VALUES).read_bytes()


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(GGUFError):
        read_metadata(path)
