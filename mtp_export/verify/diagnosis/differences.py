"""Differences of a weight from its source's that tell what made them: an adapter's low rank, or
rounding to fewer bits than it is stored in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.compared import Compared
from mtp_export.verify.diagnosis.factors import Relation

_MOST_RANK = 64
_LEAST_RATIO = 4  # of rows and columns to a rank
_GROUP = 32  # columns that share a scale in every format of 4 bits
_FEW_VALUES, _MANY_VALUES = 16, 22  # per group, of 4 bits and of more
_MANTISSA_BITS = 23  # of float32
_FP8_BITS = 3  # of a mantissa in fp8, at most


def of_rank(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield that the difference is of a low rank, within a noise."""
    found, wanted = compared.sample
    difference = found - wanted
    most = min(_MOST_RANK, min(difference.shape) // _LEAST_RATIO)
    squares = float(difference.square().sum())
    if most < 1 or not squares:
        return
    narrow = difference if len(difference) <= difference.shape[1] else difference.t()
    if len(narrow) > _MOST_RANK * 8:
        narrow = narrow[:: len(narrow) // (_MOST_RANK * 8) + 1]
        squares = float(narrow.square().sum())
    energy = torch.linalg.eigvalsh((narrow @ narrow.t()).double()).flip(0).clamp_min(0)
    left = squares - energy.cumsum(0)
    signal = float(wanted.square().sum()) * len(narrow) * narrow.shape[1] / wanted.numel()
    enough = (left <= min(most_noise * signal, squares / 10)).nonzero()[:, 0]
    if len(enough) and (rank := int(enough[0]) + 1) <= most:
        yield Relation(causes.of_low_rank(rank), max(0.0, float(left[rank - 1])) / signal)


def of_rounding(compared: Compared) -> Iterator[Relation]:
    """Yield that an unquantized weight was rounded to fp8 or 4 bits before."""
    if compared.weight.has_scales:
        return
    found, wanted = compared.sample
    if mantissa_bits(found) <= _FP8_BITS < mantissa_bits(wanted):
        yield Relation(causes.rounded_to_mantissa(mantissa_bits(found)), 0.0)
    elif _values_per_group(found) <= _FEW_VALUES and _values_per_group(wanted) >= _MANY_VALUES:
        yield Relation(causes.rounded_to_four_bits(_GROUP), 0.0)


def mantissa_bits(values: torch.Tensor) -> int:
    """Return the number of leading mantissa bits that float32 values have between them."""
    bits = values.contiguous().view(torch.int32) & ((1 << _MANTISSA_BITS) - 1)
    used = [place for place in range(_MANTISSA_BITS) if bool((bits >> place & 1).any())]
    return _MANTISSA_BITS - min(used, default=_MANTISSA_BITS)


def _values_per_group(values: torch.Tensor) -> float:
    """The mean number of different values in a group of columns; 0 for columns without groups."""
    if values.shape[1] % _GROUP:
        return 0.0
    groups = values.reshape(-1, _GROUP).sort(1)[0]
    return float((groups.diff(dim=1) != 0).sum(1).float().mean()) + 1
