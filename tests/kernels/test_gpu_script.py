"""The GPU script: its arguments are checked, and without a GPU it says so. (What it measures needs a GPU.)"""

import pytest
import torch

from tests.bench import gpu_kernels


def test_defaults_are_the_cases_that_are_reported() -> None:
    options = gpu_kernels.parse_arguments([])
    assert (options.batches, options.contexts) == ([1, 16, 64, 256], [1024, 4096, 16384])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "0"], "--batches are positive numbers"),
        (["--contexts", "-4"], "--contexts are positive numbers"),
        (["--repeats", "0"], "--repeats is a positive number"),
        (["--batches", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        gpu_kernels.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_kernels.main([]) == 2
    assert "no CUDA device 0" in capsys.readouterr().out


def test_its_inputs_agree_between_the_reference_and_the_cpu_kernels() -> None:
    """The script's own inputs, on the CPU: they are valid for the ops that it calls."""
    inputs = gpu_kernels.make_inputs([1, 5, 0], [17, 33, 4], torch.device("cpu"))
    expected = gpu_kernels.load("reference", checked=True).paged_attention(*inputs, scale=gpu_kernels.SCALE)
    got = gpu_kernels.load("cpu", checked=True).paged_attention(*inputs, scale=gpu_kernels.SCALE)
    assert float((got - expected).norm() / expected.norm()) < 4e-3
