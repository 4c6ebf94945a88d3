"""Settings of a runner's process."""

import os
import platform
from dataclasses import dataclass

from kvmanager.client import default_pool_directory
from kvmanager.settings import SettingError, setting

BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class RunnerConfig:
    """A runner: loads the model, borrows blocks from the KV manager, computes and samples tokens."""

    model: str = setting("", "path of a Hugging Face folder or of a GGUF file")
    pool_directory: str = setting(default_pool_directory(), "where the pool, its locks and its sockets lie")
    manager: str = setting("", "ZeroMQ endpoint of the manager; none: a socket in the pool directory")
    name: str = setting("", "this runner's name in logs and statistics; none: made of host and process id")
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "type of the weights; auto: bfloat16 where the processor has it, else float32",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kv_dtype: str = setting(
        "auto",
        "type of the KV cache; auto: the weights' type",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    backend: str = setting("auto", "kernels to use", choices=("auto", "cpu", "triton", "reference"))
    checked: bool = setting(
        False, "check the arguments of every kernel; slower, for tests and for hunting a fault"
    )
    block_size: int = setting(16, "size of a KV block", unit="tokens", choices=BLOCK_SIZES)
    max_num_seqs: int = setting(
        64, "sequences that may run at once", unit="sequences", minimum=1, maximum=4096
    )
    max_num_batched_tokens: int = setting(
        512, "tokens computed in one step, at most", unit="tokens", minimum=1, maximum=1 << 20
    )
    max_model_len: int = setting(
        0, "longest prompt and output together; 0: what the model allows", unit="tokens", minimum=0
    )
    threads: int = setting(
        0, "threads that compute; 0: one per core", unit="threads", minimum=0, maximum=1024
    )
    connect_seconds: float = setting(
        60.0,
        "how long to wait for the manager before giving up",
        unit="seconds",
        minimum=0.1,
        maximum=86400.0,
    )
    drain_seconds: float = setting(
        30.0,
        "how long it may take to hand running requests back to the manager after SIGTERM",
        unit="seconds",
        minimum=0.0,
    )
    frontend_seconds: float = setting(
        30.0, "how long tokens are kept for a frontend that takes none", unit="seconds", minimum=0.1
    )
    max_unsent_tokens: int = setting(
        1 << 20, "tokens kept for one frontend that takes none", unit="tokens", minimum=1
    )

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is not allowed; want at least "
                f"max_num_seqs={self.max_num_seqs}, as each running sequence computes one token per step"
            )

    @property
    def full_name(self) -> str:
        """`name`, or one that no other process on this or another host of the same pool has."""
        return self.name or f"runner-{platform.node()}-{os.getpid()}"
