"""Writing GGUF files for tests."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType


def write_gguf(
    path: Path, tensors: dict[str, tuple[str, np.ndarray]], fields: dict[str, Any], architecture: str
) -> None:
    """Tensors are name → (type, bytes `[rows, row_bytes]`)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (kind, data) in tensors.items():
        if kind in ("F32", "F16"):
            writer.add_tensor(name, data.view(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
