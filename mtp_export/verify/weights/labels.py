"""Bits of bf16 under the label of fp16, and the reverse: by the sizes of others, and by the values
of a table that must hold the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtp_checkpoints.dtypes import DType, torch_dtype
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.gates import GAP_RATIO

if TYPE_CHECKING:
    import torch

_OTHER = {DType.F16: DType.BF16, DType.BF16: DType.F16}
# How many times larger the values of a matrix may be than each other, the smallest and the largest
# tenth left out: 13 times of normal ones. Bf16 by the type fp16 makes 2 and less, the reverse 1e9
# and more.
_MOST_OF, _LEAST_SPREAD, _MOST_SPREAD = (0.1, 0.9), 4.0, 1e3
_MOST = 1 << 20  # values that are looked at
# What rounding to either changes at most, of a value and of one near zero.
_ROUNDING, _SMALLEST = 2.0**-8, 1e-6


def mislabelled_by_size(weight: WeightOnDisk, usual: float) -> str:
    """Say of a matrix that its bits are those of the other type, by which it is of the usual size;
    "" where they are not. usual: the root mean square of others."""
    import torch

    values = _under_the_other_label(weight)
    if values is None:
        return ""
    sizes = values.double().abs().flatten()[:_MOST]
    rms = float(sizes.square().mean().sqrt())
    low, high = sizes[sizes > 0].quantile(torch.tensor(_MOST_OF, dtype=sizes.dtype)).tolist()
    is_usual = usual / GAP_RATIO < rms < usual * GAP_RATIO
    return _words(weight) if is_usual and _LEAST_SPREAD < high / low < _MOST_SPREAD else ""


def mislabelled_copy(weight: WeightOnDisk, original: WeightOnDisk) -> str:
    """Say the same of a table by which it holds what another does."""
    values = _under_the_other_label(weight)
    if values is None:
        return ""
    wanted = original.encoded(0, len(values)).dequantize().float()
    are_equal = values.allclose(wanted, rtol=_ROUNDING, atol=_SMALLEST)
    return _words(weight) if are_equal else ""


def _under_the_other_label(weight: WeightOnDisk) -> torch.Tensor | None:
    """Return the first rows of an unquantized weight by the other type; None of one that has none,
    and of values that are not finite by it."""
    other = _OTHER.get(weight.tensors[0].dtype)
    if other is None or weight.stored.format is not UNQUANTIZED:
        return None
    rows = weight.codes(0, min(BLOCK, weight.rows)).contiguous()
    values = rows.view(torch_dtype(other)).float()
    return values if values.isfinite().all() else None


def _words(weight: WeightOnDisk) -> str:
    label = weight.tensors[0].dtype
    return causes.mislabelled(weight.name, str(label), str(_OTHER[label]))
