"""GPTQ beside the textbook's: one column after the other, each with the best correction of all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_kernels.quantize import quantize_int4_group
from mtp_kernels.quantize.block_floats import (
    e2m1_values,
    nvfp4_divisor,
    quantize_nvfp4,
    unpack_pairs,
)
from mtp_kernels.quantize.gptq import DAMPING, Factor, Grid, gptq, output_energy

ROWS, COLUMNS, DEAD = 16, 256, 7


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.fixture(scope="module")
def hessian() -> Tensor:
    random = torch.Generator().manual_seed(2)
    mixed = torch.randn(1024, 64, generator=random) @ torch.randn(64, COLUMNS, generator=random)
    x = (mixed + torch.randn(mixed.shape, generator=random)) * torch.linspace(0.1, 4, COLUMNS)
    x[:, DEAD] = 0
    return x.t() @ x


@pytest.fixture(scope="module", params=["int4", "nvfp4"])
def grid(request: pytest.FixtureRequest, weight: Tensor) -> Grid:
    if request.param == "int4":
        return Grid.int4(quantize_int4_group(weight, group_size=64)[0].scale.float(), 64)
    divisor = nvfp4_divisor(float(weight.abs().max()))
    return Grid.nvfp4(quantize_nvfp4(weight, divisor, sweep=False)[1].float() / divisor)


def column_by_column(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Round one column after the other, each time with the best correction of all that are left:
    by the inverse of the whole Hessian, from which the column is then eliminated, in float64."""
    hessian, left = hessian.double(), weight.double()
    order = hessian.diagonal().argsort(descending=True, stable=True)
    dead = hessian.diagonal() == 0
    left[:, dead] = 0
    hessian.diagonal()[dead] = 1
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    inverse, kept = torch.linalg.inv(hessian), torch.empty_like(left)
    for column in order.tolist():
        multiplier = grid.multiplier[:, column // grid.group_size]
        kept[:, column] = grid.nearest(left[:, column].float() / multiplier) * multiplier
        error = (left[:, column] - kept[:, column]) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        row = inverse[column].clone()
        inverse -= torch.outer(row, row) / row[column]
    return kept.float()


def test_it_is_the_best_correction_of_every_column(
    grid: Grid, weight: Tensor, hessian: Tensor
) -> None:
    numbers = gptq(weight, Factor.of(hessian), grid)
    torch.testing.assert_close(grid.nearest(numbers), numbers)
    assert not numbers[:, DEAD].any()
    loss = output_energy(grid.values(numbers) - weight, hessian)
    best = output_energy(column_by_column(weight, hessian.clone(), grid) - weight, hessian)
    assert loss == pytest.approx(best, rel=0.01)
    assert best < 0.8 * output_energy(grid.values(grid.rounded(weight)) - weight, hessian)


def test_the_hessian_of_another_layer_is_worse_than_none(
    grid: Grid, weight: Tensor, hessian: Tensor
) -> None:
    numbers = gptq(weight, Factor.of(hessian.flip(0, 1)), grid)
    plain = output_energy(grid.values(grid.rounded(weight)) - weight, hessian)
    assert output_energy(grid.values(numbers) - weight, hessian) > plain


def test_codes_are_those_of_the_quantizers(weight: Tensor) -> None:
    """Of the nearest numbers: as the formats' own conversions write them, but for the sign of 0."""
    int4, _ = quantize_int4_group(weight, group_size=64)
    own = Grid.int4(int4.scale.float(), 64)
    assert torch.equal(own.stored(own.rounded(weight)), int4.packed)
    divisor = nvfp4_divisor(float(weight.abs().max()))
    codes, scale, _ = quantize_nvfp4(weight, divisor, sweep=False)
    own = Grid.nvfp4(scale.float() / divisor)
    stored = own.stored(own.rounded(weight))
    assert torch.equal(*(e2m1_values(unpack_pairs(each)) for each in (stored, codes)))


@pytest.mark.parametrize(
    ("value", "reason"), [(-1e9, "no Cholesky factor"), (float("inf"), "Hessian")]
)
def test_a_hessian_that_is_none_is_refused(hessian: Tensor, value: float, reason: str) -> None:
    broken = hessian.clone()
    broken[0, 1] = broken[1, 0] = value
    with pytest.raises(ValueError, match=reason):
        Factor.of(broken)
