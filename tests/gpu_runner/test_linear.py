"""Products in both forms give the same model."""

from pathlib import Path

import pytest
import torch

from gpu_runner.linear import Linear, packing_pays
from gpu_runner.model import load_model
from kernels.backends import load
from tests.gpu_runner.torch_support import all_logits, make_tiny


def prepared(
    weight: torch.Tensor, bias: torch.Tensor | None, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> Linear:
    monkeypatch.setattr("gpu_runner.linear.packing_pays", lambda dtype: pays)
    linear = Linear(weight, bias)
    linear.prepare()
    assert linear.is_packed == pays
    return linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_both_forms_agree(dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(70, 48).to(dtype), torch.randn(19, 48).to(dtype)
    bias = torch.randn(70).to(dtype) if biased else None
    packed, plain = (prepared(weight, bias, pays, monkeypatch) for pays in (True, False))
    assert (packed(x) - plain(x)).float().norm() <= 0.01 * plain(x).float().norm()
    indices = torch.tensor([0, 69, 31, 32, 5])
    assert torch.equal(packed.rows(indices), weight[indices])
    assert torch.equal(plain.rows(indices), weight[indices])


def test_float32_stays_as_it_is() -> None:
    linear = Linear(torch.randn(8, 8))
    linear.prepare()
    assert not linear.is_packed


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_a_packed_model_is_the_same_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(family, tmp_path)
    found = []
    for pays in (True, False):
        monkeypatch.setattr("gpu_runner.linear.packing_pays", lambda dtype, pays=pays: pays)
        model = load_model(tmp_path, "bfloat16")
        assert model.lm_head.is_packed == model.layers[0].qkv.is_packed == pays
        found.append(all_logits(model, [3, 1, 4, 1, 5, 9, 2, 6], [5, 3], load("reference")).float())
    assert (found[0] - found[1]).norm() <= 0.02 * found[1].norm()


def test_the_choice_is_measured_once() -> None:
    assert packing_pays(torch.bfloat16) == packing_pays(torch.bfloat16)
    assert packing_pays.cache_info().misses <= 1 + packing_pays.cache_info().currsize
