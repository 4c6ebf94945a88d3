"""The packed product against its definition, in float64.

Tolerance, as a relative norm: one rounding (2⁻⁸ for bfloat16, 2⁻¹¹ for float16); 1e-6 for float32.
"""

import pytest
import torch

from kernels.cpu.linear import WIDTH, linear, pack

TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 11, 12, 13, 27, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (48, 32), (65, 33), (576, 130)])
def test_product_is_that_of_its_definition(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(rows * inputs)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    wanted = x.double() @ weight.double().T
    found = linear(x, pack(weight), outputs)
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_each_row_is_the_same_in_any_batch(rows: int) -> None:
    """A row's sums do not depend on the rows beside it: logits are the same alone and in a batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(61, 96, generator=generator).bfloat16()
    packed = pack(torch.randn(64, 96, generator=generator).bfloat16())
    together = linear(x, packed, 64)
    parts = [linear(x[first : first + rows], packed, 64) for first in range(0, 61, rows)]
    assert torch.equal(torch.cat(parts), together)


def test_rows_with_a_stride() -> None:
    x = torch.randn(9, 200).bfloat16()
    packed = pack(torch.randn(64, 96).bfloat16())
    assert torch.equal(linear(x[:, 30:126], packed, 64), linear(x[:, 30:126].contiguous(), packed, 64))


def test_packing_keeps_every_value_and_fills_with_zeros() -> None:
    weight = torch.arange(1, 41 * 3 + 1).view(41, 3).float()
    packed = pack(weight)
    assert packed.shape == (2, 3, WIDTH)
    unpacked = packed.transpose(1, 2).reshape(-1, 3)
    assert torch.equal(unpacked[:41], weight)
    assert not unpacked[41:].any()
