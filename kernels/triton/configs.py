"""Launch configurations of paged_attention: a table for Ampere, Hopper and Blackwell, with reasons.

rows × tile is a program's score matrix: `rows` query rows (tokens × padded query group) by `tile` keys.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """How one attention program is shaped."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    reason: str


# (major compute capability, phase, head size) → configuration. `num_stages` counts the pipeline's levels:
# table entry, K and V, products; so 3 keeps one tile of K and V in flight per program, 5 keeps two.
CONFIGS: dict[tuple[int, str, int], Config] = {
    (8, "decode", 64): Config(16, 64, 4, 3, "16 rows is mma.sync's least; programs per SM hide latency"),
    (8, "decode", 96): Config(16, 32, 4, 3, "masked columns (80, 96 of 128) take registers: half the tile"),
    (8, "decode", 128): Config(16, 64, 4, 3, "16 rows is mma.sync's least; 3 programs, 96 KiB in flight"),
    (8, "decode", 256): Config(16, 32, 4, 3, "half the tile: as many bytes as 64 keys of 128"),
    (8, "prefill", 64): Config(128, 64, 8, 2, "8 warps of 16 rows: each tile of K and V serves 128 rows"),
    (8, "prefill", 96): Config(128, 64, 8, 2, "as for 128, which it is padded to"),
    (8, "prefill", 128): Config(128, 64, 8, 2, "as for 64; registers allow one program per SM"),
    (8, "prefill", 256): Config(64, 32, 8, 2, "sums of 64 × 256 in 8 warps leave registers for the scores"),
    (9, "decode", 64): Config(16, 64, 4, 5, "bound by memory: two tiles in flight per program"),
    (9, "decode", 96): Config(16, 32, 4, 5, "masked columns take registers: half the tile"),
    (9, "decode", 128): Config(16, 64, 4, 5, "bound by memory: two tiles in flight, 3 programs in 227 KiB"),
    (9, "decode", 256): Config(16, 32, 4, 5, "half the tile: as many bytes as 64 keys of 128"),
    (9, "prefill", 64): Config(128, 64, 8, 3, "two warpgroups of 64 rows for wgmma"),
    (9, "prefill", 96): Config(128, 64, 8, 3, "as for 128, which it is padded to"),
    (9, "prefill", 128): Config(
        128, 64, 8, 3, "two warpgroups for wgmma; registers allow one program per SM"
    ),
    (9, "prefill", 256): Config(128, 32, 8, 2, "two warpgroups; a tile of 64 would leave 8 registers"),
    (10, "decode", 64): Config(16, 64, 4, 5, "bound by memory, as on Hopper"),
    (10, "decode", 96): Config(16, 32, 4, 5, "masked columns take registers: half the tile"),
    (10, "decode", 128): Config(16, 64, 4, 5, "bound by memory, as on Hopper"),
    (10, "decode", 256): Config(16, 32, 4, 5, "half the tile: as many bytes as 64 keys of 128"),
    (10, "prefill", 64): Config(128, 64, 8, 3, "128 rows fill tcgen05; with 2 stages it spills"),
    (10, "prefill", 96): Config(128, 64, 8, 2, "as for 128, which it is padded to"),
    (10, "prefill", 128): Config(128, 64, 8, 2, "128 rows fill tcgen05; sums live in tensor memory"),
    (10, "prefill", 256): Config(128, 32, 8, 2, "128 rows fill tcgen05; half the tile for the wider head"),
}
AMPERE, CONSUMER_BLACKWELL = 8, 12  # the latter has neither wgmma nor tensor memory, and 99 KiB per program
HEAD_SIZES = (64, 96, 128, 256)


def config_for(major: int, phase: str, head_dim: int) -> Config:
    """The configuration for a GPU's major capability; data centre GPUs newer than the table use its newest.

    Raises ValueError for a head size above the table's.
    """
    if major >= CONSUMER_BLACKWELL:
        major = AMPERE
    majors = sorted({key[0] for key in CONFIGS})
    known = max((each for each in majors if each <= major), default=majors[0])
    size = next((each for each in HEAD_SIZES if head_dim <= each), None)
    if size is None:
        raise ValueError(f"query has head_dim {head_dim}, expected at most {HEAD_SIZES[-1]}")
    return CONFIGS[known, phase, size]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major capability, multiprocessors); the CPU, where Triton interprets, counts as a small Ampere."""
    if device.type != "cuda":
        return 8, 2
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
