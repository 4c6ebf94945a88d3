"""The real engine: a model in torch, the kernels of one backend, and the mapped pool."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch

from gpu_runner.config import RunnerConfig
from gpu_runner.executor import Executor
from gpu_runner.kv_cache import map_pool, pool_shape
from gpu_runner.model import load_model
from gpu_runner.model_config import ModelError
from gpu_runner.step import Scheduled, Sequence, StepOutput, StepPlan
from kernels import backends
from kernels.warm_up import warm_up
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import Layout, SamplingParams

log = logging.getLogger(__name__)

PROGRESS_INTERVAL: Final = 1.0  # seconds between two lines about the weights
WARM_UP_TOKENS: Final = (64, 1)  # a prefill chunk, then a decode

_DTYPE_NAMES: Final[dict[torch.dtype, Literal["float32", "float16", "bfloat16"]]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class TorchEngine:
    """Implements `engine.Engine`. Raises ModelError or PagekeeperError where the settings cannot be met."""

    def __init__(self, config: RunnerConfig) -> None:
        """Loads the model and the kernels; the pool comes with `attach`."""
        self._device = torch.device(_device(config.device))
        self._ops = _ops(config.backend, self._device, config.checked)
        self._model = load_model(config.model, config.dtype, self._device, _LoadProgress())
        shape = self._model.config
        kv_dtype = self._model.dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
        self.layout = Layout(
            self._model.fingerprint,
            _DTYPE_NAMES[kv_dtype],
            config.block_size,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.vocab_size = shape.vocab_size
        self.max_model_len = config.max_model_len or shape.max_model_len
        if self.max_model_len > shape.max_model_len:
            raise ModelError(
                f"max_model_len={self.max_model_len} is not allowed; this model takes {shape.max_model_len}"
            )
        self.eos_token_ids = frozenset(self._model.eos_token_ids)
        self.shared_pool = self._device.type == "cpu"
        self._executor: Executor | None = None

    def describe(self) -> Mapping[str, object]:
        return {
            "architecture": self._model.config.architecture,
            "device": self._device,
            "dtype": _DTYPE_NAMES[self._model.dtype],
            "kv_dtype": self.layout.dtype,
            "backend": self._ops.name,
            "threads": torch.get_num_threads(),
            "fingerprint": self.layout.model[:12],
            "layers": self.layout.num_layers,
            "kv_heads": self.layout.num_kv_heads,
            "head_dim": self.layout.head_dim,
            "block_size": self.layout.block_size,
            "block_bytes": self.layout.block_bytes,
            "max_model_len": self.max_model_len,
        }

    def attach(self, pool_directory: str, num_blocks: int) -> None:
        self._executor = None  # an earlier mapping is let go first
        try:
            pool = map_pool(pool_directory, self.layout, num_blocks, self._device)
        except (OSError, ValueError) as error:
            raise PagekeeperError("internal", f"cannot map the block pool: {error}") from None
        self._executor = Executor(self._model, pool, self._ops)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Compile each kernel, then compute a chunk and a decode on a small pool that is ours alone."""
        shape, size = self._model.config, self.layout.block_size
        kernels = warm_up(
            self._ops,
            dtype=self._model.dtype,
            cache_dtype=getattr(torch, self.layout.dtype),
            num_query_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=size,
            device=str(self._device),
        )
        for name in kernels:
            progress(f"kernel={name}")
        num_blocks = -(-sum(WARM_UP_TOKENS) // size)
        pool = torch.zeros(
            pool_shape(self.layout, num_blocks),
            dtype=getattr(torch, self.layout.dtype),
            device=self._device,
        )
        executor = Executor(self._model, pool, self._ops)
        tokens, sampling = [0] * sum(WARM_UP_TOKENS), SamplingParams(max_tokens=1, seed=0)
        sequence = Sequence(0, 0, sampling, WARM_UP_TOKENS[0], tokens, list(range(num_blocks)), 0)
        for length in WARM_UP_TOKENS:
            progress(f"tokens={length}")
            executor.execute(StepPlan((Scheduled(sequence, sequence.num_computed_tokens, length, (0,)),)))
            sequence.num_computed_tokens += length

    def show_progress(self, progress: Callable[[], None]) -> None:
        self._model.on_layer = progress

    def execute(self, plan: StepPlan) -> StepOutput:
        assert self._executor is not None, "execute before attach"
        return self._executor.execute(plan)


class _LoadProgress:
    """Logs how much of the weights is loaded, now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL:
            self._last = now
            log.info("loading weights percent=%d", 100 * done // max(total, 1))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda is not allowed: torch finds no such device; want cpu or auto")
    return name


def _ops(name: str, device: torch.device, checked: bool) -> backends.Ops:
    """The kernels for `device`. Raises ModelError where they are not to be had."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    try:
        return backends.load(name, checked=checked)  # type: ignore[arg-type]  # checked there
    except ImportError as error:
        raise ModelError(f"backend={name} cannot be used here: {error}; want another backend") from None
