"""Compile the Triton kernels for GPUs that are not here, as they would be launched, and read what each takes.

`python -m tests.kernels.ahead_of_time` prints a JSON object per kernel and GPU: registers per thread, shared
memory per program, stack bytes per thread (where spilled registers go), and if it loads 16 bytes at a time.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource

from kernels.triton import copy_blocks, paged_attention, rms_norm, rotary, silu_mul, store_kv
from kernels.triton.configs import Config, config_for

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
CAPABILITIES = (80, 90, 100)
BLOCK_SIZE = 16


WIDE_LOAD = re.compile(r"ld\.global\S*\.(v4\.b32|v2\.b64)|cp\.async\S* \[[^]]*\], \[[^]]*\], 0x10")


@dataclass(frozen=True)
class Launch:
    """A kernel with the constants and options of one real launch."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    name: str
    capability: int
    registers: int
    shared: int
    stack: int
    wide_loads: bool


# Element types of pointer arguments; every other pointer is bfloat16, every other number an int32.
POINTERS = {
    "block_tables": "*i32",
    "query_start": "*i32",
    "context_lens": "*i32",
    "slot_mapping": "*i64",
    "positions": "*i64",
    "pairs": "*i64",
    "partial": "*fp32",
    "cos_sin": "*fp32",
    "source": "*i32",
    "destination": "*i32",
}
BFLOAT16 = {
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "out",
    "heads",
    "x",
    "summed",
    "weight",
    "gate_up",
}
FLOATS = {"scale", "soft_cap", "eps"}


def attention(
    capability: int,
    phase: str,
    head_dim: int,
    heads: int,
    kv_heads: int,
    window: int = 0,
    capped: bool = False,
) -> Launch:
    """paged_attention for one head size, as its launcher configures it."""
    config: Config = config_for(capability // 10, phase, head_dim)
    group = heads // kv_heads
    constants = {
        "GROUP": group,
        "PADDED_GROUP": triton.next_power_of_2(group),
        "HEADS": heads,
        "DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": BLOCK_SIZE,
        "ROWS": config.rows,
        "TILE": config.tile,
        "WINDOW": window,
        "CAPPED": capped,
        "SPLIT": phase == "decode",
        "EXTRA": paged_attention.PARTIAL_EXTRA,
    }
    options = " window, cap" if capped else ""
    name = f"attention {phase} {heads}x{kv_heads}x{head_dim}{options}"
    return Launch(name, paged_attention.attention_kernel, constants, config.num_warps, config.num_stages)


def launches(capability: int) -> Iterator[Launch]:
    """Every kernel, in the configurations that models with these head sizes launch."""
    for head_dim, heads, kv_heads in ((64, 9, 3), (80, 8, 8), (128, 32, 8), (256, 8, 4)):
        for phase in ("decode", "prefill"):
            yield attention(capability, phase, head_dim, heads, kv_heads)
    for phase in ("decode", "prefill"):
        yield attention(capability, phase, 256, 8, 4, 4096, True)
    splits = {"MOST_SPLITS": paged_attention.MAX_SPLITS, "EXTRA": paged_attention.PARTIAL_EXTRA}
    merge = {"HEADS": 32, "DIM": 128, "PADDED_DIM": 128, **splits}
    yield Launch("merge", paged_attention.merge_kernel, merge, 4)
    half = {"HALF": 64, "PADDED_HALF": 64}
    stored = {"BLOCK_SIZE": BLOCK_SIZE, "QUERY_HEADS": 32, **half}
    yield Launch("rotary", rotary.rotate_kernel, half, 1)
    yield Launch("rotary_store_kv", rotary.rotate_store_kernel, stored, 1)
    head = {"BLOCK_SIZE": BLOCK_SIZE, "DIM": 128, "PADDED_DIM": 128}
    yield Launch("store_kv", store_kv.store_kernel, head, 1)
    yield Launch("rms_norm", rms_norm.norm_kernel, {"ADDS": True, "PADDED": 4096}, 4)
    yield Launch("silu_mul", silu_mul.silu_kernel, {"COLUMNS": silu_mul.COLUMNS}, 4)
    yield Launch("copy_blocks", copy_blocks.copy_kernel, {"WORDS": copy_blocks.WORDS}, 4)


def compile_for(capability: int, launch: Launch) -> Resources:
    """Compile one kernel and read its resources from the binary."""
    names = launch.kernel.arg_names
    signature = {name: argument_type(name, launch.constants) for name in names}
    even = [
        (index,)
        for index, name in enumerate(names)
        if signature[name].startswith(("*", "i")) and name not in paged_attention.VARYING
    ]
    attributes = {path: [["tt.divisibility", 16]] for path in even}
    source = ASTSource(launch.kernel, signature, launch.constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = usage(compiled.asm["cubin"])
    wide = WIDE_LOAD.search(compiled.asm["ptx"]) is not None
    return Resources(launch.name, capability, registers, compiled.metadata.shared, stack, wide)


def argument_type(name: str, constants: dict[str, Any]) -> str:
    """Triton's type of a launch argument, by its name."""
    if name in constants:
        return "constexpr"
    if name in POINTERS:
        return POINTERS[name]
    return "*bf16" if name in BFLOAT16 else "fp32" if name in FLOATS else "i32"


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for capability in CAPABILITIES:
        for launch in launches(capability):
            print(json.dumps(asdict(compile_for(capability, launch))), flush=True)
