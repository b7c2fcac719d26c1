"""Scales of columns under which rounding to the nearest loses less of a linear's outputs: AWQ.

A column that is multiplied before it is rounded, and divided by as much where its input is made,
loses less, and the others of its group more. Scales are powers of two here, which floats take in
and out exactly.
Source: Lin et al., AWQ, 2023; the search grid of AutoAWQ and llm-compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

RATIOS = 20  # of the exponents that are tried, from 0
_LEAST = 1e-4  # of a scale


def relative_magnitude(weights: Sequence[Tensor], group_size: int) -> Tensor:
    """Return the mean over rows of what the elements of weights [N, K], fp32, are beside the
    largest of their group of columns, [K]."""
    total, rows = torch.zeros(weights[0].shape[1]), 0
    for weight in weights:
        groups = weight.abs().reshape(len(weight), -1, group_size)
        largest = groups.amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total += (groups / largest).flatten(1).sum(dim=0)
        rows += len(weight)
    return total / rows


def best_exponents(
    magnitude: Tensor, relative: Tensor, most: int, lost: Callable[[Tensor], float]
) -> Tensor:
    """Return the exponents of the scales, int8 [K], from -most to most, of which least is lost; 0
    of all columns unless others lose less.

    magnitude [K] is the mean of abs(x) of the inputs, relative that of the weights; lost returns
    the error of the outputs under exponents.
    """
    tried = (_exponents(magnitude, relative, ratio / RATIOS, most) for ratio in range(RATIOS))
    return min(_distinct([torch.zeros_like(magnitude, dtype=torch.int8), *tried]), key=lost)


def _exponents(magnitude: Tensor, relative: Tensor, ratio: float, most: int) -> Tensor:
    scales = (magnitude**ratio / (relative ** (1 - ratio) + _LEAST)).clamp(min=_LEAST)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return scales.log2().round().clamp(-most, most).to(torch.int8)


def _distinct(tried: Sequence[Tensor]) -> Iterator[Tensor]:
    seen = set[bytes]()
    for exponents in tried:
        key = exponents.numpy().tobytes()
        if key not in seen:
            seen.add(key)
            yield exponents
