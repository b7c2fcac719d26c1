"""Calibrated rounding of weights, as benchmarks/bench_calibration measures it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.common.calibrated import (
    DAMPING,
    Grid,
    Grids,
    Inputs,
    awq,
    gptq,
    int4_grids,
    nvfp4_grids,
)

ROWS, COLUMNS, DEAD = 16, 256, 7
GRIDS = {"int4": int4_grids(64, "minmax"), "nvfp4": nvfp4_grids(sweep=False)}


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    random = torch.Generator().manual_seed(2)
    mixed = torch.randn(1024, 64, generator=random) @ torch.randn(64, COLUMNS, generator=random)
    x = (mixed + torch.randn(mixed.shape, generator=random)) * torch.linspace(0.1, 4, COLUMNS)
    x[:, DEAD] = 0
    return Inputs(x.t() @ x, x.abs().mean(dim=0))


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
        kept[:, column] = grid.rounded(left[:, column].float(), column)
        error = (left[:, column] - kept[:, column]) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        row = inverse[column].clone()
        inverse -= torch.outer(row, row) / row[column]
    return kept.float()


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_gptq_is_the_best_correction_of_every_column(
    grids: Grids, weight: Tensor, inputs: Inputs
) -> None:
    (grid,) = grids([weight])
    kept = gptq(weight, inputs.hessian, grid)
    torch.testing.assert_close(grid.rounded(kept), kept)
    assert not kept[:, DEAD].any()
    expected = inputs.loss(column_by_column(weight, inputs.hessian.clone(), grid) - weight)
    assert inputs.loss(kept - weight) == pytest.approx(expected, rel=0.01)
    assert expected < 0.8 * inputs.loss(grid.rounded(weight) - weight)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_hessian_of_another_layer_is_worse_than_none(
    grids: Grids, weight: Tensor, inputs: Inputs
) -> None:
    (grid,) = grids([weight])
    other = gptq(weight, inputs.hessian.flip(0, 1), grid)
    assert inputs.loss(other - weight) > inputs.loss(grid.rounded(weight) - weight)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_awq_never_loses_to_no_scales(grids: Grids, weight: Tensor, inputs: Inputs) -> None:
    halves = [weight[:8], weight[8:]]
    ((first, second),) = awq([halves], inputs, grids)
    plain = [grid.rounded(half) for grid, half in zip(grids(halves), halves, strict=True)]
    loss = inputs.loss(torch.cat([first, second]) - weight)
    assert loss < inputs.loss(torch.cat(plain) - weight)
