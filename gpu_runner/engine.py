"""What the server needs of the side that computes; `torch_engine` is the real one, tests have a fake."""

from collections.abc import Callable, Mapping
from typing import Protocol

from gpu_runner.step import StepOutput, StepPlan
from kvmanager.protocol import Layout


class Engine(Protocol):
    """A loaded model. `attach` comes before `warm_up` and `execute`, and again after every new session."""

    @property
    def layout(self) -> Layout:
        """What this model's blocks mean."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens after which the model has nothing more to say."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output together."""

    @property
    def shared_pool(self) -> bool:
        """Whether blocks are in the pool directory's `kv.bin`, and not in the memory of a device."""

    def describe(self) -> Mapping[str, object]:
        """What the log says of it at start, by name."""

    def attach(self, pool_directory: str, num_blocks: int) -> None:
        """Map the pool. Raises PagekeeperError if its bytes are not there or not these."""

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Compute what a first request would otherwise wait for; writes no block of the pool."""

    def show_progress(self, progress: Callable[[], None]) -> None:
        """From now on call `progress` several times in each step: a long one is not a standstill."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step."""
