"""Statistics of stored weights, by group of codes and of a whole weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtp_kernels.quantize.layouts import sqnr_db


class CodeGroups(NamedTuple):
    """Statistics of codes by group, in units of the group's scale.

    low and high F32, square_sum F64, in the shape of the scales. A NaN among the codes makes
    square_sum NaN, and low and high meaningless. outer: codes of all groups together that lie in
    the lower or upper quarter of an integer's range.
    """

    low: torch.Tensor
    high: torch.Tensor
    square_sum: torch.Tensor
    outer: int = 0


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of a weight's values, or of some rows of it; `+` joins those of several.

    square_sum is NaN or infinite where a value is not finite or the scales are no scales, and the
    other figures then mean nothing: dequantizing says why. outer_codes: integer codes in the lower
    or upper quarter of their range. blocks, full_blocks: fp8 blocks that are not all zero, and
    those that reach the largest code. power_of_two_scales: every scale of an fp8 block is one.
    """

    elements: int = 0
    low: float = math.inf
    high: float = -math.inf
    square_sum: float = 0.0
    outer_codes: int = 0
    blocks: int = 0
    full_blocks: int = 0
    power_of_two_scales: bool = True

    def __add__(self, other: WeightStatistics) -> WeightStatistics:
        return WeightStatistics(
            elements=self.elements + other.elements,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            square_sum=self.square_sum + other.square_sum,
            outer_codes=self.outer_codes + other.outer_codes,
            blocks=self.blocks + other.blocks,
            full_blocks=self.full_blocks + other.full_blocks,
            power_of_two_scales=self.power_of_two_scales and other.power_of_two_scales,
        )

    @property
    def is_sound(self) -> bool:
        """True where every value can be decoded and is finite."""
        return math.isfinite(self.square_sum)

    @property
    def is_constant(self) -> bool:
        """True where several values are all the same."""
        return self.low == self.high and self.elements > 1

    @property
    def root_mean_square(self) -> float:
        return math.sqrt(self.square_sum / max(1, self.elements))


UNSOUND = WeightStatistics(square_sum=math.nan)


@dataclass(frozen=True)
class Difference:
    """Difference of a weight from the one it was made of: Σw², Σ(w-ŵ)² and max |w-ŵ|."""

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.signal + other.signal, self.noise + other.noise, max(self.largest, other.largest)
        )

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite where nothing was lost."""
        return sqnr_db(self.signal, self.noise)
