"""AWQ's search of scales, as benchmarks/bench_calibration measures it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.calibrated import Grids, Inputs, awq, int4_grids, nearest, nvfp4_grids

ROWS, COLUMNS = 16, 256
GRIDS = {"int4": int4_grids(64, "minmax"), "nvfp4": nvfp4_grids("minmax")}


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_awq_never_loses_to_no_scales(grids: Grids) -> None:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(ROWS, COLUMNS, generator=random) * 0.02
    mixed = torch.randn(1024, 64, generator=random) @ torch.randn(64, COLUMNS, generator=random)
    x = (mixed + torch.randn(mixed.shape, generator=random)) * torch.linspace(0.1, 4, COLUMNS)
    x[:, ::9] *= 30  # between columns that are alike, powers of two gain nothing
    inputs, halves = Inputs.of(x), [weight[:8], weight[8:]]
    ((first, second),) = awq([halves], inputs, grids)
    plain = [nearest(grid, half) for grid, half in zip(grids(halves), halves, strict=True)]
    loss = inputs.loss(torch.cat([first, second]) - weight)
    assert loss < inputs.loss(torch.cat(plain) - weight)
