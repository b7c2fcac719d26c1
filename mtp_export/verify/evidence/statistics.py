"""Ratios with confidence intervals clustered by prompt: tokens of one text are not independent,
prompts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio, its confidence interval and its denominator; low and high are None if fewer than two
    prompts had any data."""

    value: float
    low: float | None
    high: float | None
    count: int

    def shown(self, digits: int = 3) -> str:
        """Text as in 0.786 [0.751, 0.821]."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def percent(self, width: int = 0) -> str:
        """Text of a share as in 79 % [75, 82], the value in as many columns as width."""
        value = f"{100 * self.value:{width}.0f} %"
        if self.low is None or self.high is None:
            return value
        low, high = max(0.0, self.low), min(1.0, self.high)  # that of few prompts may be beyond
        return f"{value} [{100 * low:.0f}, {100 * high:.0f}]"

    def as_json(self) -> dict[str, float | int | None]:
        return {"value": self.value, "low": self.low, "high": self.high, "count": self.count}


def ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate | None:
    """Sum of numerators over sum of denominators, one of each per prompt; None if that is zero.

    The interval is that of the ratio estimator (Cochran, Sampling Techniques, 6.4) with Student's t
    over the prompts that have any data.
    """
    pairs = [(n, d) for n, d in zip(numerators, denominators, strict=True) if d]
    total = sum(denominator for _, denominator in pairs)
    if not pairs:
        return None
    value = sum(numerator for numerator, _ in pairs) / total
    count = len(pairs)
    if count < 2:
        return Estimate(value=value, low=None, high=None, count=int(total))
    squares = sum((numerator - value * denominator) ** 2 for numerator, denominator in pairs)
    error = math.sqrt(count / (count - 1) * squares) / total
    reach = student_quantile(0.5 + confidence / 2, count - 1) * error
    return Estimate(value=value, low=value - reach, high=value + reach, count=int(total))


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t quantile: exact for 1 and 2 degrees of freedom, else Hill's expansion."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        alpha = 4 * probability * (1 - probability)
        return 2 * (probability - 0.5) * math.sqrt(2 / alpha)
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def critical_chi_square(freedom: int, alpha: float) -> float:
    """The value that a chi-square statistic exceeds with probability alpha (Wilson-Hilferty)."""
    spread = 2 / (9 * freedom)
    quantile = NormalDist().inv_cdf(1 - alpha)
    return float(freedom * (1 - spread + quantile * math.sqrt(spread)) ** 3)
