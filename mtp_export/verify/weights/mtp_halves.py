"""The halves of the columns of a projection, which take the embedding and the hidden state: neither
was lost, filled in, rounded to zero or taken for the other, in whatever format it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_checkpoints.families.name_parts import linear_of
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.quantization.method import projections_of
from mtp_checkpoints.quantization.mismatches import StoredTensor
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify import gates
from mtp_export.verify.check import Item, judged, not_tested
from mtp_export.verify.diagnosis.causes import parts_lost
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.weights.extents import is_zero

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import Input, ModelSpec
    from mtp_checkpoints.formats import WeightFormat
    from mtp_checkpoints.quantization.stored import StoredWeight
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import PartLayout


@dataclass(frozen=True)
class _Half:
    """One half of a projection's columns: the root mean square, the share of zeros, and that of
    elements that are as large as the one before and no zero."""

    size: float
    zeros: float
    repeated: float


def run(context: Context) -> Iterator[Item]:
    """The projections of the modules that have one matrix for both halves, but for those that an
    earlier item is about, as of one value."""
    layout = next((layout for layout in context.layouts if layout.name == MTP), None)
    if layout is None:
        return
    formats = {
        kind.format: None
        for one in context.layouts
        for kind in one.stored.kinds
        if kind.format is not UNQUANTIZED and kind.format.is_decoded and not kind.format.of_experts
    }
    projections = projections_of(layout.stored.family)
    for weight in layout.stored.weights.values():
        if weight.weight.module in projections:
            stored = _on_disk(layout, weight, [*formats], context.unwritten_tensors)
            if stored is not None and stored.name not in context.named_tensors:
                yield _halves(stored, _inputs_of(layout.stored.family, weight))


def _on_disk(
    layout: PartLayout,
    promised: StoredWeight,
    formats: Sequence[WeightFormat],
    lost: frozenset[str],
) -> WeightOnDisk | None:
    """Return a projection as it is stored: as config.json says, or in a format of the linears, in
    which engines do not read it. None where it is there in neither, or a tensor was lost."""
    tensors = layout.checkpoint.tensors
    for stored in (promised, *(_in_format(promised, one) for one in formats)):
        found = [tensors.get(one.name) for one in stored.tensors]
        infos = tuple(one for one in found if one is not None)
        fits = len(infos) == len(found) and all(
            spec.fits(info) for spec, info in zip(stored.tensors, infos, strict=True)
        )
        if fits and stored.format.is_decoded:
            return WeightOnDisk(stored, infos) if lost.isdisjoint(i.name for i in infos) else None
    return None


def _in_format(weight: StoredWeight, other: WeightFormat) -> StoredWeight:
    tensors = other.tensors(
        f"{weight.tensors[0].name.rpartition('.')[0]}.weight", weight.weight.shape
    )
    stored = (StoredTensor(one.name, one.shape, other.accepted_dtypes(one)) for one in tensors)
    return weight._replace(format=other, tensors=tuple(stored))


def _inputs_of(family: ModelSpec, weight: StoredWeight) -> tuple[Input, Input]:
    """Return the inputs that the halves of a projection's columns take."""
    module = weight.weight.module
    return next(one.inputs for one in family.mtp if one.modules.projection == module)


def _halves(weight: WeightOnDisk, inputs: tuple[Input, Input]) -> Item:
    """Neither half of a projection's columns, of embedding and hidden state, is zeroed, of one
    value, far smaller than the other, or taken for it."""
    name = f"mtp: halves of {linear_of(weight.stored.weight.name)}"
    try:
        halves = _measured(weight)
    except ValueError as error:
        return not_tested(name, f"it cannot be decoded: {error}", subject=weight.name)
    first, second = halves
    smaller, larger = sorted((first.size, second.size))
    ratio = f" ({larger / smaller:.1f} times)" if smaller else ""
    cause = _cause(weight, halves, inputs)
    return judged(
        name,
        not cause,
        cause,
        figure=f"{first.size:.3g} and {second.size:.3g}{ratio};"
        f" {first.zeros:.0%} and {second.zeros:.0%} zeros",
        bound=f"≤ {gates.ZERO_SHARE:.0%} zeros, {gates.HALF_RATIO:.0f} times",
        subject=weight.name,
        data={"size": [first.size, second.size], "zeros": [first.zeros, second.zeros]},
    )


def _cause(weight: WeightOnDisk, halves: tuple[_Half, _Half], inputs: tuple[Input, Input]) -> str:
    """Return what is wrong with a half, "" where nothing is."""
    first, second = halves
    middle = weight.stored.weight.shape[1] // 2

    def half(number: int) -> str:
        return parts_lost.half(weight.name, number, middle, f"the {inputs[number]}")

    if first == second and first.size > 0:  # sums over every element of each
        return causes.halves_alike(weight.name)
    most = int(first.zeros <= second.zeros)
    if halves[most].zeros > gates.ZERO_SHARE:
        scales = _scales(weight)
        return parts_lost.half_zeroed(half(most), scales, all_zero=halves[most].zeros == 1)
    most = int(first.repeated <= second.repeated)
    if halves[most].repeated > gates.ZERO_SHARE:
        return parts_lost.half_filled(half(most))
    smaller, larger = sorted((first.size, second.size))
    if larger > gates.HALF_RATIO * smaller:
        return parts_lost.half_far_smaller(half(int(second.size < first.size)), larger / smaller)
    return ""


def _scales(weight: WeightOnDisk) -> parts_lost.Scales:
    """Return whether the halves have scales, and one for both."""
    if not weight.has_scales:
        return "none"
    return "apart" if weight.scale.dim() > 1 and weight.scale.shape[-1] > 1 else "shared"


def _measured(weight: WeightOnDisk) -> tuple[_Half, _Half]:
    import torch

    sums, elements = torch.zeros(3, 2, dtype=torch.float64), 0
    for start, stop in weight.pieces():
        values = weight.encoded(start, stop).dequantize().double()
        halves = torch.stack(values.chunk(2, dim=1))
        counted = (halves.square(), is_zero(halves), _is_repeated(halves))
        sums += torch.stack([one.sum(dim=(1, 2)) for one in counted])
        elements += halves[0].numel()
    squares, zeros, repeated = sums / elements
    shares = zip(squares.sqrt().tolist(), zeros.tolist(), repeated.tolist(), strict=True)
    first, second = (_Half(*one) for one in shares)
    return first, second


def _is_repeated(halves: torch.Tensor) -> torch.Tensor:
    """Return which values [2, n, k] are as large as the one before and no zero [2, n, k - 1]."""
    sizes = halves.abs()
    return (sizes[..., 1:] == sizes[..., :-1]) & ~is_zero(sizes[..., 1:])
