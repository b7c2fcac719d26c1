"""AWQ's search of scales, which are powers of two."""

from __future__ import annotations

import numpy as np
import torch

from mtp_kernels.quantize.awq import RATIOS, best_exponents, relative_magnitude

COLUMNS, GROUP, MOST = 64, 16, 8


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes of columns and a weight."""
    random = torch.Generator().manual_seed(3)
    spread = torch.linspace(-3, 3, COLUMNS).exp2()
    return spread, torch.randn(24, COLUMNS, generator=random)


def test_the_grid_is_that_of_autoawq() -> None:
    """Its rule written out (AutoAWQ 88e4c76, quantizer.py), rounded to powers of two."""
    magnitude, weight = inputs()
    seen: list[list[int]] = []

    def lost(exponents: torch.Tensor) -> float:
        seen.append(exponents.tolist())
        return float(len(seen))

    relative = relative_magnitude([weight[:8], weight[8:]], GROUP)
    assert best_exponents(magnitude, relative, MOST, lost).tolist() == [0] * COLUMNS
    groups = np.abs(weight.double().numpy()).reshape(-1, GROUP)
    mean = (groups / groups.max(axis=1, keepdims=True)).reshape(weight.shape).mean(axis=0)
    wanted = [[0] * COLUMNS]
    for number in range(RATIOS):
        ratio = number / 20
        scales = (magnitude.double().numpy() ** ratio / (mean ** (1 - ratio) + 1e-4)).clip(1e-4)
        scales /= np.sqrt(scales.max() * scales.min())
        rounded = np.round(np.log2(scales)).astype(int).tolist()
        wanted += [] if rounded in wanted else [rounded]
    assert seen == wanted and len(seen) > 5


def test_the_least_is_chosen_within_bounds() -> None:
    magnitude, weight = inputs()
    relative = relative_magnitude([weight], GROUP)
    magnitude[:2] = torch.tensor([0.0, 1e9])
    found = best_exponents(magnitude, relative, MOST, lambda one: -float(one.abs().sum()))
    assert found.dtype == torch.int8 and found.min() == -MOST and found.max() == MOST
