"""Checked mode: bad input raises an error that names the tensor; off, the ops are bare functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.backends import Ops, load
from kernels.warm_up import warm_up
from tests.kernels.cases import Shape, make_batch

POOL = torch.zeros(4, 1, 2, 1, 8, 16)
HEADS = (torch.zeros(2, 3, 16), torch.zeros(2, 1, 16))
ATTENTION = ("query", "key_cache", "value_cache", "block_tables", "query_start", "context_lens")


def attention_arguments(**changes: Any) -> dict[str, Any]:
    batch = make_batch([(1, 20), (3, 5)])
    return {**dict(zip(ATTENTION, batch.arguments, strict=True)), "scale": 0.125, **changes}


def store_arguments(**changes: Any) -> dict[str, Any]:
    pool = torch.zeros(4, 1, 2, 3, 16, 64)
    tokens = torch.zeros(2, 3, 64)
    caches = {"key_cache": pool[:, 0, 0], "value_cache": pool[:, 0, 1]}
    return {"key": tokens, "value": tokens, **caches, "slot_mapping": torch.tensor([0, 63]), **changes}


def table_of(block: int) -> torch.Tensor:
    return torch.full((2, 4), block, dtype=torch.int32)


BAD_ATTENTION = {
    "query has dtype": {"query": torch.zeros(4, 9, 64, dtype=torch.float64)},
    "query has shape": {"query": torch.zeros(4, 9 * 64)},
    "query has stride": {"query": torch.zeros(4, 9, 128)[:, :, ::2]},
    "query has 10 heads": {"query": torch.zeros(4, 10, 64)},
    "key_cache has shape": {"key_cache": torch.zeros(4, 3, 16, 32)},
    "value_cache has dtype": {"value_cache": torch.zeros(4, 3, 16, 64, dtype=torch.bfloat16)},
    "block_tables has dtype": {"block_tables": table_of(0).long()},
    "block_tables has 1 blocks": {"block_tables": table_of(0)[:, :1].contiguous()},
    r"block_tables\[0\] has values from 9": {"block_tables": table_of(9)},
    "query_start begins with 1": {"query_start": torch.tensor([1, 2, 4], dtype=torch.int32)},
    "query_start ends with 9": {"query_start": torch.tensor([0, 1, 9], dtype=torch.int32)},
    "query_start falls": {"query_start": torch.tensor([0, 3, 2], dtype=torch.int32)},
    r"context_lens\[1\] is 2": {"context_lens": torch.tensor([20, 2], dtype=torch.int32)},
    "context_lens has dtype": {"context_lens": torch.tensor([20, 5])},
    "out has shape": {"out": torch.zeros(3, 9, 64)},
    "scale is 0": {"scale": 0.0},
    "sliding_window is -1": {"sliding_window": -1},
    "soft_cap is -1": {"soft_cap": -1.0},
}
BAD_STORE = {
    "slot_mapping has values from 0 to 64": {"slot_mapping": torch.tensor([0, 64])},
    "slot_mapping has values from -2": {"slot_mapping": torch.tensor([-2, 3])},
    "slot_mapping names a slot twice": {"slot_mapping": torch.tensor([3, 3])},
    "slot_mapping has dtype": {"slot_mapping": torch.tensor([0, 1], dtype=torch.int32)},
    "slot_mapping has shape": {"slot_mapping": torch.tensor([0])},
    "value has shape": {"value": torch.zeros(2, 2, 64)},
    "block size 4": {"key_cache": torch.zeros(4, 3, 4, 64), "value_cache": torch.zeros(4, 3, 4, 64)},
    "head_dim 8": {
        "key": torch.zeros(2, 3, 8),
        "value": torch.zeros(2, 3, 8),
        "key_cache": torch.zeros(4, 3, 16, 8),
        "value_cache": torch.zeros(4, 3, 16, 8),
    },
}


@pytest.mark.parametrize("message", BAD_ATTENTION)
def test_bad_attention_input_names_the_tensor(cpu: Ops, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cpu.paged_attention(**attention_arguments(**BAD_ATTENTION[message]))


@pytest.mark.parametrize("message", BAD_STORE)
def test_bad_store_input_names_the_tensor(cpu: Ops, message: str) -> None:
    store: Callable[..., None] = cpu.store_kv
    with pytest.raises((TypeError, ValueError), match=message):
        store(**store_arguments(**BAD_STORE[message]))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("copy_blocks", (POOL, torch.tensor([[0, 4]])), r"pairs\[:, 1\]"),
        ("copy_blocks", (POOL, torch.tensor([[0, 1], [2, 1]])), "twice"),
        ("copy_blocks", (POOL, torch.tensor([[0, 1], [1, 2]])), "as source and"),
        (
            "swap_blocks",
            (POOL, torch.zeros(4, 1, 2, 1, 8, 32), torch.tensor([[0, 1]])),
            "destination has shape",
        ),
        ("rms_norm", (torch.zeros(2, 8), torch.zeros(9), 1e-5), "weight has shape"),
        ("rms_norm", (torch.zeros(2, 8), torch.zeros(8), 1e-5, torch.zeros(3, 8)), "residual has shape"),
        ("silu_mul", (torch.zeros(2, 7),), "gate_up has 7 columns"),
        (
            "rotary",
            (*HEADS, torch.tensor([0, 9]), torch.zeros(9, 16)),
            "positions has values",
        ),
        (
            "rotary",
            (*HEADS, torch.tensor([0, 1]), torch.zeros(9, 8)),
            "cos_sin has shape",
        ),
    ],
)
def test_bad_input_of_small_ops_names_the_tensor(
    cpu: Ops, op: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(cpu, op)(*arguments)


def test_unchecked_ops_are_the_functions_themselves() -> None:
    from kernels.cpu.paged_attention import paged_attention

    assert load("cpu").paged_attention is paged_attention


def test_unchecked_cpu_ops_still_refuse_a_dtype_they_cannot_read() -> None:
    with pytest.raises(TypeError, match="float64"):
        load("cpu").silu_mul(torch.zeros(2, 4, dtype=torch.float64))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    name: Any = "cuda"
    with pytest.raises(ValueError, match="'cuda' is unknown; choose one of reference, cpu, triton"):
        load(name)


def test_warm_up_names_every_op_and_its_calls_pass_the_checks(cpu: Ops) -> None:
    shape = Shape()
    names = list(
        warm_up(
            cpu,
            dtype=torch.float32,
            cache_dtype=torch.bfloat16,
            num_query_heads=shape.query_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
        )
    )
    assert names[-1] == "paged_attention"
    assert len(names) == len(set(names)) == 7
