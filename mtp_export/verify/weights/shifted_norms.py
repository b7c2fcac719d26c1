"""Norms of the MTP module that are 1 too small or too large, as those of 1 + w in the place of w:
by signs that no trained norm has, and beside the main layers' norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import median
from typing import TYPE_CHECKING, Literal

from mtp_checkpoints.families.base import FLOATS, Role, weight_name
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.tensors.mlx_forms import mlx_file
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, Status, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.unwritten import written_weights
from mtp_export.verify.gates import (
    MANY_NEGATIVE,
    MEDIAN_NORM,
    NEGATIVE_NORM,
    NORM_RATIO,
    SOME_NEGATIVE,
)
from mtp_export.verify.weights.unnamed_values import is_filled

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.containers.base import TensorInfo
    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context

_DELTA = ".linear_attn."  # whose norms multiply by w where others add 1
_READ_FROM_AFAR = 4  # main norms of each kind, which are a request each
_FEW = 3  # main norms of a kind, of which fewer tell no range
# Beside the main layers' medians: how far out the median of a norm lies that is 1 off, and how near
# it lies with that undone; and how much wider its values may be spread than theirs.
_APART, _NEAR, _WIDER = 0.5, 0.25, 1.5
_SEVERAL = 2  # norms, which are not that far out by chance

Way = Literal["small", "large"]


@dataclass(frozen=True)
class _Norm:
    """A norm as it is stored: less the offset. kind: its name in its layer."""

    tensor: TensorInfo
    kind: str
    values: torch.Tensor
    offset: float

    @property
    def median(self) -> float:
        return float(self.values.median())

    @property
    def spread(self) -> float:
        return float(self.values.std())

    @property
    def negative(self) -> float:
        """The share of what it multiplies by that is negative."""
        return float((self.values + self.offset < 0).float().mean())

    @property
    def lowest(self) -> float:
        """The smallest number that it multiplies by."""
        return float(self.values.min()) + self.offset

    @property
    def may_be_large(self) -> bool:
        """True where 1 may be taken from it, and it lies nearer to that than to what it is."""
        return self.lowest >= 1 and self.median > MEDIAN_NORM + 1 - self.offset

    def size(self, by: int = 0) -> float:
        """Root mean square of what it multiplies by, with a number added."""
        return float((self.values + self.offset + by).double().square().mean().sqrt())


# Norms of the main layers by kind, and under "" the last one, behind them.
Main = Mapping[str, Sequence[_Norm]]


def run(context: Context) -> Iterator[Item]:
    """The norms of the module, and those of the main layers where these alone are off."""
    layout = next((layout for layout in context.layouts if layout.name == MTP), None)
    if layout is None:
        return
    family = layout.stored.family
    offset = family.facts.norm_offset
    weights = written_weights(layout, context.unwritten_tensors | context.named_tensors)
    found = ((one.stored.weight.name, one.tensors[0]) for one in weights)
    own = [*_norms(found, _names(family), offset)]
    main = _of_main(context, family)
    if offset and own and _of_layers(main):
        item = _main_norms(main, own)
        yield item
        if item.status is Status.FAIL:
            return
    ways = (_shifted if offset else _all_large)(own, main)
    problems = [
        Problem(one.tensor.name, _words(one, ways[one.tensor.name]))
        for one in own
        if one.tensor.name in ways
    ]
    if own:
        yield verdict("mtp: norms as the main model's", problems, counted(len(own), "norm"))


def _names(family: ModelSpec) -> Mapping[str, str]:
    """Return the norms that the offset of a family is of, each with its kind."""
    return {
        one.name: in_layer(one.name)[1]
        for one in family.tensors.values()
        if one.role is Role.NORM
        and len(one.shape) == 1
        and one.name.endswith(".weight")
        and _DELTA not in one.name
    }


def _norms(
    stored: Iterable[tuple[str, TensorInfo]], kinds: Mapping[str, str], offset: float
) -> Iterator[_Norm]:
    """Yield those of the stored tensors that are such norms, and were not filled with one value."""
    for name, tensor in stored:
        if name in kinds and tensor.dtype in FLOATS and not is_filled(tensor):
            values = read_rows(tensor, 0, tensor.shape[0]).float()
            if values.isfinite().all():
                yield _Norm(tensor, kinds[name], values, offset)


def _of_main(context: Context, family: ModelSpec) -> Main:
    """Return the norms of the main layers, of a main model that cannot be decoded too."""
    if context.main is None:
        return {}
    tensors, lost = context.main.tensors, context.unwritten_tensors
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, kind in _names(family).items():
        is_last = name == weight_name(family.norm)
        if not is_last and (family.tensors[name].mtp_layer is not None or not in_layer(name)[0]):
            continue
        if name in tensors and name not in lost:
            by_kind["" if is_last else kind].append(name)
    offset, found = family.facts.norm_offset, dict[str, Sequence[_Norm]]()
    for kind, names in by_kind.items():
        step = 1 if context.is_local else -(-len(names) // _READ_FROM_AFAR)
        stored = ((name, tensors[name]) for name in names[::step])
        if norms := [*_norms(stored, dict.fromkeys(names, kind), offset)]:
            found[kind] = norms
    return found


def _of_layers(main: Main) -> list[_Norm]:
    return [one for kind, alike in main.items() if kind for one in alike]


def _main_norms(main: Main, own: Sequence[_Norm]) -> Item:
    """The main layers' norms hold the w of 1 + w, some of which is negative, as some of the
    module's is."""
    norms = _of_layers(main)
    theirs, of_module = (max(map(_below_zero, ones)) for ones in (norms, own))
    lie_around_one = all(one.median > MEDIAN_NORM for one in norms)
    shifted = theirs == 0 and of_module > SOME_NEGATIVE and lie_around_one
    words = causes.main_norms_hold_w(of_module)
    return verdict(
        "main: norms hold the w of 1 + w",
        [Problem(norms[0].tensor.name, words)] if shifted else [],
        f"{len(norms)} norms, at most {theirs:.0%} negative; of the module {of_module:.0%}",
    )


def _below_zero(norm: _Norm) -> float:
    return float((norm.values < 0).float().mean())


def _shifted(own: Sequence[_Norm], main: Main) -> Mapping[str, Way]:
    """Return which norms of a module that engines add 1 to are 1 off, by the names of tensors:
    those that are by themselves, and of several of them those that were moved with these."""
    of_main = _of_layers(main)
    are_positive = bool(of_main) and all(one.negative <= SOME_NEGATIVE for one in of_main)
    least = MANY_NEGATIVE if are_positive else NEGATIVE_NORM
    ways: dict[str, Way] = {}
    most = NORM_RATIO * max((one.spread for one in of_main), default=inf)
    for one in (norm for norm in own if norm.spread <= most):  # others have been multiplied
        way: Way | None = "small" if one.negative > least else _way(one, main)
        if way is not None:
            ways[one.tensor.name] = way
    if len(ways) >= _SEVERAL and len(found := {*ways.values()}) == 1:
        (usual,) = found
        ways |= {one.tensor.name: usual for one in own if _was_moved(one, main, usual)}
    return ways


def _all_large(own: Sequence[_Norm], main: Main) -> Mapping[str, Way]:
    """Return those of a module that are multiplied as they are, where all that the main layers have
    the like of are 1 too large: one alone may have been trained so."""
    alike = [one for one in own if one.kind in main]
    if len(alike) < _SEVERAL or any(_way(one, main) != "large" for one in alike):
        return {}
    return {one.tensor.name: "large" for one in own if one in alike or one.may_be_large}


def _way(norm: _Norm, main: Main) -> Way | None:
    """Return which way a norm is 1 off, whose median would be among those of the main layers'
    norms, of its kind or of all, if 1 were added to it or taken from it."""
    theirs, more = main.get(norm.kind, ()), list[float]()
    if len(theirs) < _FEW:
        theirs, more = _of_layers(main), [one.median for one in main.get("", ())]
    if not theirs or norm.spread > _WIDER * max(one.spread for one in theirs):
        return None
    if norm.kind not in main and not _is_as_narrow(norm, theirs):
        return None
    medians = [*(one.median for one in theirs), *more]
    lowest, highest = min(medians), max(medians)
    apart = max(_APART, highest - lowest)  # of norms that grow with the layers it may be the next
    if norm.may_be_large and norm.median > highest + apart:
        return "large" if lowest - _NEAR <= norm.median - 1 <= highest + _NEAR else None
    if norm.negative > SOME_NEGATIVE and norm.median < lowest - apart:
        return "small" if lowest - _NEAR <= norm.median + 1 <= highest + _NEAR else None
    return None


def _is_as_narrow(norm: _Norm, theirs: Sequence[_Norm]) -> bool:
    """Return whether a norm that no main layer has the like of, which training may have made large,
    is as narrow as most of theirs, and lies as a whole nearer to one than to zero."""
    usual = median(one.spread for one in theirs)
    return norm.spread <= _WIDER * usual and (norm.negative > 0 or norm.lowest > 1 + MEDIAN_NORM)


def _was_moved(norm: _Norm, main: Main, way: Way) -> bool:
    """Return whether a norm lies where others of its module do that are known to be 1 off: beside
    those of its kind in the main layers, or by its values alone."""
    if theirs := main.get(norm.kind):
        sizes = [log(one.size()) for one in theirs]
        usual = sum(sizes) / len(sizes)
        undone = norm.size(1 if way == "small" else -1)
        return undone > 0 and abs(log(undone) - usual) < abs(log(norm.size()) - usual) / 2
    return norm.negative > SOME_NEGATIVE if way == "small" else norm.may_be_large


def _words(norm: _Norm, way: Way) -> str:
    name, tensor = norm.tensor.name, norm.tensor
    if not norm.offset:
        return causes.norm_had_one_added(name, norm.median)
    return causes.norm_off_by_one(name, norm.median, lower=way == "small", of_mlx=mlx_file(tensor))
