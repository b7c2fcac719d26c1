"""Reference backend in torch, plain: it defines the extremes and counts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mtp_kernels.weight_statistics.figures import CodeGroups, Difference

_OUTER_INT8 = 64  # the outer quarters of [-128, 127], both ends alike
_OUTER_INT4 = 5


def float_group(values: torch.Tensor) -> CodeGroups:
    return _groups(values.to(torch.float32)[None, None])


def fp8_groups(codes: torch.Tensor, rows: int, columns: int) -> CodeGroups:
    values = codes.to(torch.float32)

    def tiles(padding: float) -> torch.Tensor:  # [⌈N/rows⌉, ⌈K/columns⌉, rows * columns]
        edges = (0, -values.shape[1] % columns, 0, -values.shape[0] % rows)
        padded = F.pad(values, edges, value=padding)
        cut = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        return cut.transpose(1, 2).flatten(2)

    return CodeGroups(
        low=tiles(math.inf).amin(2),
        high=tiles(-math.inf).amax(2),
        square_sum=tiles(0.0).to(torch.float64).square().sum(2),
    )


def int8_groups(codes: torch.Tensor) -> CodeGroups:
    values = codes.to(torch.float32) - 128
    return _groups(values[:, None], outer=int((values.abs() >= _OUTER_INT8).sum()))


def int4_groups(pairs: torch.Tensor, groups: int, flipped: int) -> CodeGroups:
    offset = pairs ^ flipped
    values = torch.stack((offset & 15, offset >> 4), dim=-1).flatten(1).to(torch.float32) - 8
    outer = int((values.abs() >= _OUTER_INT4).sum())
    return _groups(values.view(len(pairs), groups, -1), outer=outer)


def difference(wanted: torch.Tensor, found: torch.Tensor) -> Difference:
    wide = wanted.to(torch.float64)
    error = found.to(torch.float64) - wide
    return Difference(
        signal=float(wide.square().sum()),
        noise=float(error.square().sum()),
        largest=float(error.abs().max()),
    )


def _groups(values: torch.Tensor, outer: int = 0) -> CodeGroups:
    low, high = values.aminmax(dim=2)
    return CodeGroups(low, high, values.to(torch.float64).square().sum(2), outer)
