"""Reading a GGUF file: its metadata and where its tensors lie, passing over the tokenizer's large arrays.

The `gguf` package's own reader builds an array object per vocabulary entry (seconds for 50,000 tokens),
which a runner has no use for; so the header is walked here, and of the package only the type tables and
dequantisers are used. Layout: github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3, little endian).
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from gpu_runner.model_config import ModelError

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
LONG_ARRAY = 64  # entries; arrays beyond this are the tokenizer's, and are skipped

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor in the file: `rows` of `columns` values (a vector is one row), `row_bytes` bytes each."""

    name: str
    kind: GGMLQuantizationType
    rows: int
    columns: int
    row_bytes: int
    offset: int  # bytes from the start of the file


class GgufFile:
    """A mapped GGUF file. Raises ModelError where it is none, or holds types that are not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._position = 0
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it begins with {self._data[:4]!r}, not b'GGUF'")
        self._position = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is cut off in its header, or damaged: {error}") from None

    def _read_header(self) -> None:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; supported are 2 and 3, little endian")
        tensor_count, field_count = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        described = [self._tensor_description() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._position // alignment) * alignment
        self.tensors = {item[0]: self._located(*item, start) for item in described}

    def values(self, tensor: GgufTensor, first: int = 0, last: int | None = None) -> np.ndarray[Any, Any]:
        """Rows [first, last) of a tensor as float32 `[rows, columns]`."""
        last = tensor.rows if last is None else last
        raw = np.frombuffer(
            self._data, np.uint8, (last - first) * tensor.row_bytes, tensor.offset + first * tensor.row_bytes
        )
        return dequantize(raw.reshape(last - first, tensor.row_bytes), tensor.kind)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._position)
        self._position += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._position += length
        return self._data[self._position - length : self._position].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} has a metadata value of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | None:
        """A short array's values; a long one is passed over."""
        kind, length = self._scalar("<I"), self._scalar("<Q")
        if length <= LONG_ARRAY:
            return [self._value(kind) for _ in range(length)]
        if kind == _STRING:
            self._skip_strings(length)
        elif kind in _SCALARS:
            self._position += length * struct.calcsize(_SCALARS[kind])
        else:
            raise ModelError(
                f"{self.path} has a long metadata array of the type {kind}; want strings or numbers"
            )
        return None

    def _skip_strings(self, count: int) -> None:
        position, read_length, data = self._position, struct.Struct("<Q").unpack_from, self._data
        for _ in range(count):
            position += 8 + read_length(data, position)[0]
        self._position = position

    def _tensor_description(self) -> tuple[str, list[int], int, int]:
        name = self._string()
        shape = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _located(self, name: str, shape: list[int], kind: int, offset: int, start: int) -> GgufTensor:
        known = GGMLQuantizationType._value2member_map_
        found = known[kind].name if kind in known else f"number {kind}"
        if found not in SUPPORTED_TYPES:
            raise ModelError(
                f"tensor {name} of {self.path} has the type {found}; "
                f"supported are {', '.join(SUPPORTED_TYPES)}"
            )
        if len(shape) > 2:
            raise ModelError(
                f"tensor {name} of {self.path} has {len(shape)} dimensions; supported are 1 and 2"
            )
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        columns = shape[0]
        rows = shape[1] if len(shape) == 2 else 1
        row_bytes = columns // values * size
        if start + offset + rows * row_bytes > len(self._data):
            raise ModelError(
                f"{self.path} is cut off: tensor {name} ends beyond the file's {len(self._data)} bytes"
            )
        return GgufTensor(name, GGMLQuantizationType(kind), rows, columns, row_bytes, start + offset)
