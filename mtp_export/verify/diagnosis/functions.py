"""Functions of each element that make a weight of its source's: a reciprocal, say, or a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.compared import Compared
from mtp_export.verify.diagnosis.factors import Relation
from mtp_export.verify.diagnosis.orders import noise_of

_UNLIKE = 0.1  # of a weight's variance, which a function of the source's does not give
_LEAST_CLIPPED = 4  # elements at a limit
_EQUAL = 0.9  # of the elements that differ, where others may not be finite


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
    """Yield the functions that make the weight of its source's, within a noise."""
    found, wanted = compared.sample
    spread = float((found - found.mean()).square().sum())
    stored_as = compared.weight.encoded(0, 1).codes.dtype
    functions = {causes.of_a_function(name): one for name, one in _FUNCTIONS.items()}
    for words, function in functions.items():
        changed = function(wanted)
        signal = max(float(changed.square().sum()), 1e-30)
        noise = noise_of(found, changed)
        if noise <= min(most_noise * signal, _UNLIKE * spread):
            yield Relation(words, noise / signal)
            return
    if compared.weight.has_scales:
        return
    for words, changed in (*((w, one(wanted)) for w, one in functions.items()), *_exact(wanted)):
        rounded = changed.to(stored_as).float()
        told = (found != wanted) | (rounded != wanted)  # elsewhere the function changes nothing
        if float((rounded == found)[told].float().mean()) >= _EQUAL:
            yield Relation(words, 0.0)


def _bits(stored_as: torch.dtype, read_as: torch.dtype, w: torch.Tensor) -> torch.Tensor:
    return w.to(stored_as).view(read_as).float()


def _bytes_swapped(w: torch.Tensor) -> torch.Tensor:
    raw = w.bfloat16().contiguous().view(torch.uint8).reshape(-1, 2)
    return raw.flip(1).contiguous().view(torch.bfloat16).float().view(w.shape)


_OF_BITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    causes.READ_AS_FP16: partial(_bits, torch.bfloat16, torch.float16),
    causes.READ_AS_BF16: partial(_bits, torch.float16, torch.bfloat16),
    causes.BYTES_SWAPPED: _bytes_swapped,
}


def _exact(wanted: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of which little is left: with the 1 of a norm too many or too few, to which they are
    rounded, and by bits that were taken for those of another dtype."""
    for words, function in _OF_BITS.items():
        yield words, function(wanted)
    yield causes.plus("+1"), wanted + 1
    yield causes.plus("-1"), wanted - 1
    yield causes.multiple_plus("-1", "+1"), 1 - wanted


def of_zeros(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield that scattered elements are zero, and all others the source's."""
    found, wanted = compared.sample
    lost = (found == 0) & (wanted != 0)
    kept = torch.where(lost, 0, wanted)
    noise, signal = noise_of(found, kept), max(float(found.square().sum()), 1e-30)
    if int(lost.sum()) >= _LEAST_CLIPPED and noise <= most_noise * signal:
        words = causes.elements_zero(int(lost.sum()), wanted.numel())
        yield Relation(words, noise / signal)


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
