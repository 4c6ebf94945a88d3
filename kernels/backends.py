"""The backend table: a name → ops of one signature (`reference` says what each means)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

BackendName = Literal["reference", "cpu", "triton"]


class PagedAttention(Protocol):
    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one backend."""

    name: BackendName
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: PagedAttention
    copy_blocks: Callable[[Tensor, Tensor], None]
    swap_blocks: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: RmsNorm
    silu_mul: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    rotary_store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


OP_FILES = {
    "store_kv": "store_kv",
    "paged_attention": "paged_attention",
    "copy_blocks": "copy_blocks",
    "swap_blocks": "swap_blocks",
    "rms_norm": "rms_norm",
    "silu_mul": "silu_mul",
    "rotary": "rotary",
    "rotary_store_kv": "rotary",
}


def load(name: BackendName, *, checked: bool = False) -> Ops:
    """Import one backend and return its ops; `checked` puts each behind the checks of kernels/checks.py.

    Raises ValueError for an unknown name, ImportError where its compiler (numba, triton) is missing.
    """
    known = get_args(BackendName)
    if name not in known:
        raise ValueError(f"kernel backend {name!r} is unknown; choose one of {', '.join(known)}")
    ops = {op: getattr(import_module(f"kernels.{name}.{file}"), op) for op, file in OP_FILES.items()}
    if checked:
        checks = import_module("kernels.checks").CHECKS
        ops = {op: behind_check(function, checks[op]) for op, function in ops.items()}
    return Ops(name, **ops)


def behind_check(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The op, called only with arguments that its check accepts."""

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return function(*arguments, **options)

    return checked
