"""Bits of packed codes that were lost, or of values that were made from them: every value, or every
second row, column or element of a norm, of one sign or zero, as a mask, a cast or a nibble that was
never written leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import parts_lost as causes
from mtp_export.verify.weights.extents import is_zero

if TYPE_CHECKING:
    import torch

    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.weight_facts import WeightFacts

_PERIOD = 8  # of what is packed together: the nibbles of a word
_FEW = 32  # values, which may be of one sign by chance
_FEW_ZEROS = 8  # elements of a norm, which may be zero by chance


def run(context: Context) -> Iterator[Item]:
    """The linears of all parts by their ranges; those of the MTP part and its norms by rows too."""
    problems, count = list[Problem](), 0
    unwritten, named = context.unwritten_tensors, context.named_tensors
    for layout in context.read_layouts:
        for fact in context.walks.of(layout.name).facts:
            weight = fact.weight
            names = {tensor.name for tensor in weight.tensors}
            if weight.name in named or not names.isdisjoint(unwritten) or not _is_read(fact):
                continue
            count += 1
            if words := _words(fact, by_rows=layout.name == MTP):
                problems.append(Problem(weight.name, words))
    if count:
        yield verdict("codes with all their bits", problems, counted(count, "weight"))


def _is_read(fact: WeightFacts) -> bool:
    """Return whether a weight is a linear, a projection of a module, or a norm."""
    spec = fact.weight.stored.weight
    is_norm = spec.role is Role.NORM and len(spec.shape) == 1 and spec.name.endswith(".weight")
    return spec.is_linear_weight or spec.role is Role.MTP_PROJECTION or is_norm


def _words(fact: WeightFacts, *, by_rows: bool) -> str:
    """Say what is lost of a linear; "" for nothing."""
    weight, found, of_codes = fact.weight, fact.statistics, fact.weight.has_scales
    axes = len(weight.stored.weight.shape)
    if not found.is_sound or found.is_constant:
        return ""
    if axes > 1 and found.elements >= _FEW and (found.high <= 0 or found.low >= 0):
        place = f"all values of {weight.name}"
        return causes.bits_lost(place, are_zero=False, of_codes=of_codes)
    if not by_rows or axes > 2:
        return ""
    for axis, across in _ways(fact).items():
        zero, of_one_sign = _lost(across)
        for lost, are_zero in ((zero, True), (of_one_sign, False)):
            if 0 < len(lost) < _PERIOD and (are_zero or of_codes):
                place = f"{_place(axis, lost)} of {weight.name}"
                lost_codes = of_codes and (not are_zero or _is_packed(fact))
                return causes.bits_lost(place, are_zero=are_zero, of_codes=lost_codes)
    return ""


def _is_packed(fact: WeightFacts) -> bool:
    """Return whether several codes share a byte or a word."""
    codes, *_ = fact.weight.tensors
    return tuple(codes.shape) != fact.weight.stored.weight.shape


def _ways(fact: WeightFacts) -> dict[str, torch.Tensor]:
    """Return the first values of codes [n, k] by axis, for the rest the mean squares [1, n] that
    the walk has of its rows, columns or elements; none of what it did not look into."""
    import torch

    weight, note = fact.weight, fact.note
    if weight.has_scales:
        values = weight.encoded(0, min(BLOCK, weight.rows)).dequantize().float()
        return {"columns": values, "rows": values.t()}
    if note is None:
        return {}
    columns, rows = torch.tensor([note.columns]), torch.tensor([note.rows])
    is_norm = len(weight.stored.weight.shape) == 1
    return {"elements": columns} if is_norm else {"columns": columns, "rows": rows}


def _lost(values: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return which of every _PERIOD columns of a matrix are zero, and which of one sign."""
    import torch

    rows, columns = values.shape
    each = columns // _PERIOD
    if rows * each < (_FEW if rows > 1 else _FEW_ZEROS):
        return [], []
    by_place = values[:, : each * _PERIOD].reshape(-1, _PERIOD)
    zero = is_zero(by_place).all(0)
    of_one_sign = ((by_place <= 0).all(0) | (by_place >= 0).all(0)) & ~zero
    return torch.nonzero(zero).flatten().tolist(), torch.nonzero(of_one_sign).flatten().tolist()


def _place(axis: str, lost: list[int]) -> str:
    if lost in ([0, 2, 4, 6], [1, 3, 5, 7]):
        parity = "odd" if lost[0] else "even"
        return f"the {parity} {axis} ({lost[0]}, {lost[1]}, {lost[2]} and so on)"
    listed = ", ".join(map(str, lost))
    return f"{len(lost)} of every {_PERIOD} {axis} ({listed} and so on)"
