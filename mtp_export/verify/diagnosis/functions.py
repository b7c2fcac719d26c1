"""Functions of each element that make a weight of its source's: a reciprocal, say, or a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.compared import Compared
from mtp_export.verify.diagnosis.factors import Relation
from mtp_export.verify.diagnosis.orders import noise_of

_UNLIKE = 0.1  # of a weight's variance, which a function of the source's does not give
_LEAST_CLIPPED = 4  # elements at a limit


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the absolute value": torch.abs,
    "the reciprocal": torch.reciprocal,
    "the exponential": torch.exp,
    "minus the exponential": lambda w: -torch.exp(w),
    "the logarithm": torch.log,
    "the square": torch.square,
    "the square root": torch.sqrt,
    "the sigmoid": torch.sigmoid,
}


def of_functions(compared: Compared, most_noise: float) -> Iterator[Relation]:
    found, wanted = compared.sample
    spread = float((found - found.mean()).square().sum())
    stored_as = compared.weight.encoded(0, 1).codes.dtype
    for name, function in _FUNCTIONS.items():
        changed = function(wanted)
        signal = max(float(changed.square().sum()), 1e-30)
        noise = noise_of(found, changed)
        if noise <= min(most_noise * signal, _UNLIKE * spread):
            yield Relation(causes.of_a_function(name), noise / signal)
    if len(compared.weight.tensors) == 1:
        for words, changed in _with_one(wanted):
            if torch.equal(changed.to(stored_as).float(), found):
                yield Relation(words, 0.0)


def _with_one(wanted: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Values with the 1 of a norm too many or too few, of which rounding may leave next to none."""
    yield causes.plus("+1"), wanted + 1
    yield causes.plus("-1"), wanted - 1
    yield causes.multiple_plus("-1", "+1"), 1 - wanted


def of_limits(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield that the weight is its source's within limits, if some elements lay beyond them."""
    found, wanted = compared.sample
    low, high = float(found.min()), float(found.max())
    limited = wanted.clamp(low, high)
    noise, signal = noise_of(found, limited), max(float(found.square().sum()), 1e-30)
    cut = int(((wanted > high) | (wanted < low)).sum())
    if cut >= _LEAST_CLIPPED and noise <= most_noise * signal:
        words = causes.clipped(cut, wanted.numel(), f"{low:.3g}", f"{high:.3g}")
        yield Relation(words, noise / signal)
