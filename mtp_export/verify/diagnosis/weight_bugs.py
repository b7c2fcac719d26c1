"""Diagnosis of a weight that differs from its source's: each known export bug is undone, and the
one whose undoing gives the source back is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import HeadRows, RotaryRows
from mtp_checkpoints.formats import EncodedWeight, Fp8Block
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.formats.verification import Bug
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.diagnosis.latent_halves import undone_halves
from mtp_export.verify.diagnosis.regrouped import own_groups

if TYPE_CHECKING:
    import torch

_SAMPLE_ELEMENTS = 1 << 23
_WHOLE_ELEMENTS = 1 << 26  # of weights whose rows may be in another order
_CLOSE_DB = 6.0  # a weight of another version of the model: half its size is the source's
# Of a weight that is near already, a bug explains the difference if undoing it brings it this much
# nearer: one whose undoing has next to no effect, such as an order of equal scales, does not.
_NEARER_DB = 10.0
_SLIGHT_DB = 3.0  # by which undoing nothing to speak of may bring a weight nearer
_NEAR_SCALES = 0.05  # scales that differ by less are those of the same weight, rounded otherwise
_DAMAGED_SHARE = 0.01  # of the elements: damage of a file, where a conversion changes most of them
_SAME_SIGNS = 0.99
_MOST_DAMAGED_SHARE = 0.5  # of those of a weight without any relation to its source's
_FEW = 3  # elements of a short vector
_LEAST_FITTED_DB = 25.0  # of a weight with the scales that fit its codes
_FITTED = 0.03  # of a scale: error of the one that fits codes of few bits
_LEAST_ROUNDED = 0.1  # octaves between scales that were rounded to powers of two and those before
_REFITTED_DB = 2.0  # by which other scales bring a weight nearer that has wrong ones
_LAYER = re.compile(r"^((?:.+?\.)?layers\.)(\d+)(\..*)$")


def explain(weight: WeightOnDisk, source: WeightOnDisk, weights: Mapping[str, WeightOnDisk]) -> str:
    """The likely cause why a weight is not the source's, in words; weights: all of the source's, by
    their released names."""
    from mtp_export.verify.diagnosis import relations
    from mtp_export.verify.diagnosis.compared import compare

    stop = _sample_rows(weight)
    raw = weight.encoded(0, stop)
    wanted = source.encoded(0, stop).dequantize()
    bound = weight.stored.format.gate.sqnr_db
    try:
        found = raw.dequantize()
    except ValueError as error:
        return str(error)
    if float(found.max()) == float(found.min()):
        return causes.CONSTANT
    level = _sqnr_db(wanted, found)
    bound = level + _NEARER_DB if level >= bound else max(bound, level + _SLIGHT_DB)
    spec = source.stored.weight
    of_heads = (*_of_rope(spec.rotary, found), *_of_heads(spec.head_rows, found))
    bugs = (*of_heads, *undone_halves(weight, found), *_of_codes(raw))
    if (cause := _first_undone(bugs, wanted, bound)) is not None:
        return cause
    of_scales = _scales(raw, wanted, min(bound, _LEAST_FITTED_DB))
    if of_scales not in (None, causes.SCALES_OF_ANOTHER_TENSOR):
        return of_scales
    try:
        compared = compare(weight, source, other_scales=of_scales is not None)
    except ValueError as error:
        return str(error)
    if (cause := relations.relation(compared) or of_scales) is not None:
        return cause
    alike = list(_alike(source, weights))
    if (cause := _of_another(raw, found, alike, bound)) is not None:
        return cause
    changed = _differs(raw, wanted).float()
    if float(changed.mean()) < _DAMAGED_SHARE or _is_few(changed):
        return _damaged(weight, source)
    cause = relations.partly(compared, alike, _vectors(source, weights))
    if cause is not None:
        return cause
    if float(changed.mean()) < _MOST_DAMAGED_SHARE:
        return _damaged(weight, source)
    return causes.another_version(level) if level >= _CLOSE_DB else causes.NOTHING_IN_COMMON


def explain_within(weight: WeightOnDisk, source: WeightOnDisk) -> str | None:
    """The cause if a weight within the bound of its form has scales that are not its own, or rows
    or columns that are not the source's, in words; None for a sound one."""
    from mtp_export.verify.diagnosis.compared import compare
    from mtp_export.verify.diagnosis.parts import lost

    if (cause := lost(compare(weight, source))) is not None:
        return cause
    stop = _sample_rows(weight)
    raw, wanted = weight.encoded(0, stop), source.encoded(0, stop).dequantize()
    return _scales(raw, wanted, _sqnr_db(wanted, raw.dequantize()) + _REFITTED_DB)


def _first_undone(bugs: Iterable[Undone], wanted: torch.Tensor, bound: float) -> str | None:
    """The first bug whose undoing brings the values to the bound, None if none does."""
    for words, undone in bugs:
        try:
            values = undone()
            if _sqnr_db(wanted[: len(values)], values) >= bound:
                return words
        except (ValueError, RuntimeError):
            continue
    return None


def _of_another(
    raw: EncodedWeight, found: torch.Tensor, alike: Iterable[WeightOnDisk], bound: float
) -> str | None:
    """The cause if a weight, or its codes, are another's."""
    for other in alike:
        if _holds(found, other, bound):
            return causes.holds_another(other.stored.weight.name)
        if raw.scale is not None and _has_signs(found, other):
            return causes.holds_codes_of(other.stored.weight.name)
    return None


def damaged_elements(weight: WeightOnDisk, original: WeightOnDisk) -> int:
    """Return the number of elements that differ from the original's where they are so few that one
    of the two was damaged; 0 where they are more, and where codes cannot be decoded."""
    try:
        count = _unequal(weight, original)
    except ValueError:
        return 0
    return count if count < _DAMAGED_SHARE * elements(weight) else 0


def lost_rows(weight: WeightOnDisk, original: WeightOnDisk) -> int:
    """Return the number of rows that are zero here and not in the original (ValueError for codes
    without a value)."""
    count = 0
    for start, stop in weight.pieces():
        ours, theirs = (one.encoded(start, stop).dequantize() for one in (weight, original))
        count += int((~ours.bool().any(dim=-1) & theirs.bool().any(dim=-1)).count_nonzero())
    return count


def elements(weight: WeightOnDisk) -> int:
    """Return the number of a weight's elements."""
    return math.prod(weight.stored.weight.shape)


def _damaged(weight: WeightOnDisk, source: WeightOnDisk) -> str:
    """The damage of a weight that is the source's in nearly all of the rows that were looked at."""
    try:
        return causes.elements_damaged(_unequal(weight, source), elements(weight))
    except ValueError as error:
        return str(error)


def _is_few(changed: torch.Tensor) -> bool:
    """True for a vector of which a few elements alone differ."""
    return changed.ndim == 1 and float(changed.sum()) <= min(_FEW, len(changed) // 8)


def _unequal(one: WeightOnDisk, other: WeightOnDisk) -> int:
    """Return the number of elements whose values differ (ValueError for codes without a value)."""
    count = 0
    for start, stop in one.pieces():
        theirs = other.encoded(start, stop).dequantize()
        count += int(_differs(one.encoded(start, stop), theirs).count_nonzero())
    return count


def _differs(ours: EncodedWeight, theirs: torch.Tensor) -> torch.Tensor:
    """True where values differ, of an unquantized weight from others in its dtype."""
    if ours.scale is None:
        theirs = theirs.to(ours.codes.dtype)
    return ours.dequantize() != theirs.float()


def _alike(source: WeightOnDisk, weights: Mapping[str, WeightOnDisk]) -> Iterator[WeightOnDisk]:
    """Weights of the same shape that could be taken for this one: others of its layer, those of the
    same name in other layers, those of no layer, and any vector."""
    spec = source.stored.weight
    match = _LAYER.match(spec.name)
    for name, other in weights.items():
        if other.stored.weight.shape != spec.shape or name == spec.name:
            continue
        if len(spec.shape) == 1 or _are_beside(match, _LAYER.match(name)):
            yield other


def _are_beside(one: re.Match[str] | None, other: re.Match[str] | None) -> bool:
    """True for names of one layer, of the same weight of two, or if either is in no layer."""
    if one is None or other is None:
        return True
    return one.groups()[:2] == other.groups()[:2] or one[3] == other[3]


def held_by(weight: WeightOnDisk, others: Mapping[str, WeightOnDisk]) -> list[str]:
    """Return the names of those of some weights of its shape that a weight is, within the bound of
    its form."""
    alike = {n: o for n, o in others.items() if o.stored.weight.shape == weight.stored.weight.shape}
    try:
        found = weight.encoded(0, _sample_rows(weight)).dequantize()
    except ValueError:
        return []
    bound = weight.stored.format.gate.sqnr_db
    return [name for name, other in alike.items() if _holds(found, other, bound)]


def _holds(found: torch.Tensor, other: WeightOnDisk, bound: float) -> bool:
    """True if the first rows of a weight are another's; a block of them tells most apart."""
    for rows in sorted({min(BLOCK, len(found)), len(found)}):
        if _sqnr_db(other.encoded(0, rows).dequantize(), found[:rows]) < bound:
            return False
    return True


def _has_signs(found: torch.Tensor, other: WeightOnDisk) -> bool:
    """True if the first rows of a weight have the signs of another's, whatever their scales."""
    theirs = other.encoded(0, min(BLOCK, len(found))).dequantize()
    both = found[: len(theirs)] * theirs
    return float((both > 0).float().mean()) >= _SAME_SIGNS * float((both != 0).float().mean())


def _vectors(source: WeightOnDisk, weights: Mapping[str, WeightOnDisk]) -> dict[str, torch.Tensor]:
    """The vectors of a weight's layer, by name."""
    match = _LAYER.match(source.stored.weight.name)
    return {
        name: other.encoded(0, other.rows).dequantize()
        for name, other in weights.items()
        if len(other.stored.weight.shape) == 1
        and match is not None
        and name.startswith(f"{match[1]}{match[2]}.")
    }


def _sample_rows(weight: WeightOnDisk) -> int:
    shape = weight.stored.weight.shape
    columns = math.prod(shape[1:])
    if weight.stored.weight.head_rows is not None and shape[0] * columns <= _WHOLE_ELEMENTS:
        return shape[0]
    if len(shape) > 2:
        return min(shape[0], max(1, _SAMPLE_ELEMENTS // columns))
    return min(shape[0], max(BLOCK, _SAMPLE_ELEMENTS // columns // BLOCK * BLOCK))


def _sqnr_db(wanted: torch.Tensor, values: torch.Tensor) -> float:
    from mtp_kernels.weight_statistics import difference

    if wanted.shape != values.shape:
        return -math.inf
    return difference(wanted.float(), values.float()).sqnr_db


# A cause, and the weight's values with that bug undone.
Undone = tuple[str, Callable[[], "torch.Tensor"]]


def _of_rope(rotary: RotaryRows | None, found: torch.Tensor) -> list[Undone]:
    """Rotary rows stored as two halves although the model pairs neighbours, or the reverse."""
    import torch

    if rotary is None or len(found) < rotary.period:
        return []
    period, first, size = rotary.period, rotary.first, rotary.size
    halves = torch.arange(size).view(2, -1).t().reshape(-1)
    undone: list[Undone] = []
    for order in (halves, halves.argsort()):
        rows = torch.arange(period)
        rows[first : first + size] = first + order
        heads = torch.arange(0, len(found) - period + 1, period)
        places = (heads[:, None] + rows).reshape(-1)
        undone.append((causes.ROPE_ROWS_REORDERED, partial(torch.index_select, found, 0, places)))
    return undone


def _of_heads(rows: HeadRows | None, found: torch.Tensor) -> list[Undone]:
    """Rows sorted by kind although the model has each head's side by side, or the reverse."""
    import torch

    if rows is None or len(found) != rows.heads * sum(rows.sizes):
        return []
    starts = [rows.heads * sum(rows.sizes[:kind]) for kind in range(len(rows.sizes))]
    by_head = torch.cat(
        [
            torch.arange(start + head * size, start + (head + 1) * size)
            for head in range(rows.heads)
            for start, size in zip(starts, rows.sizes, strict=True)
        ]
    )
    order = by_head if rows.by_head else by_head.argsort()
    return [(causes.ROWS_OF_HEADS_REORDERED, partial(torch.index_select, found, 0, order))]


def _of_codes(raw: EncodedWeight) -> list[Undone]:
    """Bugs of packing and scaling codes."""
    scale = raw.scale_apart
    if scale is None:
        return []
    undone: list[Undone] = [
        (
            causes.SCALES_INVERTED,
            lambda: replace(raw, scale=(1 / scale.float()).to(scale.dtype)).dequantize(),
        ),
        (
            causes.SCALES_ALONG_ROWS,
            lambda: replace(raw, scale=_other_axis(scale)).dequantize(),
        ),
    ]
    return undone + [(bug.cause, partial(_without, bug, raw, scale)) for bug in raw.format.bugs]


def _without(bug: Bug, raw: EncodedWeight, scale: torch.Tensor) -> torch.Tensor:
    return EncodedWeight(raw.format, *bug.undo(raw.codes, scale)).dequantize()


def _other_axis(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(scale.shape[1], scale.shape[0]).t().contiguous()


def _scales(raw: EncodedWeight, wanted: torch.Tensor, bound: float) -> str | None:
    """The cause if other scales would make the codes the source's, else None."""
    import torch

    if raw.scale_apart is None or raw.scale is None or len(raw.shape) > 2:
        return None
    ones = replace(raw, scale=torch.ones_like(raw.scale))
    codes = ones.dequantize().double()
    own = raw.scale.double()
    moved = own_groups(codes, own, wanted.double())
    if moved is not None and _sqnr_db(wanted, codes * own[:, moved]) >= bound:
        return causes.COLUMNS_OF_OTHER_GROUPS
    groups = _spread(raw, torch.arange(own.numel()).view(own.shape))  # [N, K] group of a weight
    dots = torch.zeros(own.numel(), dtype=torch.float64)
    norms = dots.clone()
    flat = groups.reshape(-1)
    dots.index_add_(0, flat, (codes * wanted.double()).reshape(-1))
    norms.index_add_(0, flat, codes.square().reshape(-1))
    best = torch.where(norms > 0, dots / norms.clamp_min(1e-30), torch.ones_like(dots))
    fitted = codes * best[flat].view(codes.shape)
    if _sqnr_db(wanted, fitted) < bound:
        return None
    exact = isinstance(raw.format, Fp8Block)
    return _named_scales(own, best.view(own.shape), 0.002 if exact else _FITTED)


def _spread(raw: EncodedWeight, scale: torch.Tensor) -> torch.Tensor:
    """A scale-shaped tensor spread to [N, K], one entry per element of the weight."""
    rows, columns = raw.shape
    if isinstance(raw.format, Fp8Block):
        whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return whole[:rows, :columns]
    return scale.repeat_interleave(columns // scale.shape[1], 1)


def _named_scales(own: torch.Tensor, best: torch.Tensor, tolerance: float) -> str | None:
    """The bug that made the stored scales of those that fit; None if they are the same."""
    import torch

    from mtp_export.verify.diagnosis.orders import Subject, find_order

    def alike(ratio: torch.Tensor) -> bool:
        return bool((ratio - 1).abs().max() < tolerance)

    ratio = own / best
    if alike(ratio):
        return None
    if bool((own == 1).all()):
        return causes.SCALES_LEFT_OUT
    octaves = ratio.clamp_min(1e-30).log2()
    is_between = float((octaves - octaves.round()).abs().median()) > _LEAST_ROUNDED
    if bool((torch.frexp(own)[0] == 0.5).all()) and is_between:
        return causes.SCALES_ROUNDED_LATE
    if alike(own.reshape(-1).sort()[0] / best.reshape(-1).sort()[0]):
        return causes.SCALES_PERMUTED
    factor = float(ratio.median())
    spread = float((ratio / factor - 1).square().mean().sqrt())
    if factor > 0 and spread < tolerance < abs(factor - 1):
        return causes.scales_off_by(factor)
    if bool((ratio - 1).abs().max() < _NEAR_SCALES):
        return None
    rows, most = Subject.all_of("row", None), _NEAR_SCALES**2
    ours, theirs = own.float(), best.float()
    if find_order(ours, theirs, rows, most) or find_order(ours.t(), theirs.t(), rows, most):
        return causes.SCALES_PERMUTED
    return causes.SCALES_OF_ANOTHER_TENSOR
