"""Norms beside those of the same name in the main layers: none of the MTP module's is of another
size, and those of one main layer alone are not 1 too small or too large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import FLOATS, Role, TensorSpec
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import balance
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.weights.sizes import is_alone

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.tensors.reader import Checkpoint
    from mtp_export.verify.context import Context

_A_PAIR = 2  # of norms or layers, which may be so by chance
_OTHER_KINDS = (".linear_attn.", ".indexer.")  # whose norms multiply by w where others add 1

Layers = Mapping[str, Mapping[str, "torch.Tensor"]]  # norms as stored, by layer and by kind


def run(context: Context) -> Iterator[Item]:
    """The norms of the main layers, and those of the module that have a counterpart there; of a
    main model that cannot be decoded too, whose norms are stored as they are."""
    family = next((layout.stored.family for layout in context.layouts), None)
    if family is None or context.main is None or not context.is_local:
        return
    offset = family.facts.norm_offset
    specs = family.tensors.values()
    of_all = _norms(context, context.main, (one for one in specs if one.mtp_layer is None))
    main = {layer: norms for layer, norms in of_all.items() if layer}
    module: Layers = {}
    if context.mtp is not None:
        of_mtp = (one for one in specs if one.mtp_layer is not None)
        module = _norms(context, context.mtp, of_mtp)
    problems = [*_of_one_layer(main, offset)] or [*_far_from_all(main, module, offset)]
    yield verdict("main: norms of the layers alike", problems, counted(len(main), "layer"))
    if module:
        told = context.named_tensors
        found = [one for one in _sizes(module, of_all, offset) if one.subject not in told]
        count = counted(sum(map(len, module.values())), "norm")
        yield verdict("mtp: norms as large as the main layers'", found, count)


def _norms(context: Context, checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> Layers:
    """Return the norms of a part that are written and not constant, under "" those of no layer."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    lost = context.unwritten_tensors
    for spec in specs:
        tensor, (layer, kind) = checkpoint.tensors.get(spec.name), in_layer(spec.name)
        is_norm = spec.role is Role.NORM and len(spec.shape) == 1 and kind.endswith(".weight")
        if tensor is None or not is_norm or tensor.dtype not in FLOATS:
            continue
        if tensor.name in lost:
            continue
        values = read_rows(tensor, 0, tensor.shape[0]).float()
        if values.isfinite().all() and values.min() != values.max():
            found[layer][kind] = values
    return found


def _of_one_layer(main: Layers, offset: float) -> Iterator[Problem]:
    """Yield the norms of the one layer in which all are 1 off, and in no other any; or of all
    layers, where engines add 1 and 1 was taken from each twice."""
    if len(main) <= _A_PAIR:
        return
    for how in ("small", "large") if offset else ("small",):
        off = {
            layer: [_lies_off(one, how, offset) for one in _of_stream(norms).values()]
            for layer, norms in main.items()
        }
        layers = [layer for layer, shares in off.items() if any(shares)]
        shares = [share for layer in layers for share in off[layer]]
        is_off = len(shares) >= _A_PAIR and min(shares) > 0 and max(shares) > gates.NEGATIVE_NORM
        if is_off and (
            len(layers) == 1 or (len(layers) == len(main) and how == "small" and offset)
        ):
            for layer in layers:
                for kind, values in _of_stream(main[layer]).items():
                    name = f"{layer}.{kind}"
                    yield Problem(name, _words(name, values, how, offset))
            return


def _words(name: str, values: torch.Tensor, how: str, offset: float) -> str:
    median, negative = float(values.median()), float((values < 0).float().mean())
    if not offset:
        return causes.norm_centred_at_zero(name, negative)
    return causes.norm_off_by_one(name, median, lower=how == "small")


def _of_stream(norms: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {
        kind: values
        for kind, values in norms.items()
        if not any(other in f".{kind}" for other in _OTHER_KINDS)
    }


def _lies_off(values: torch.Tensor, how: str, offset: float) -> float:
    """Return the share of a norm by which it lies where one does that is 1 too small, of one too
    large 1, and 0 for a few."""
    if how == "large":
        is_large = values.min() >= 0 and values.median() > gates.MEDIAN_NORM
        return 1.0 if is_large else 0.0
    share = float((values + offset < 0).float().mean())
    return share if share > gates.SOME_NEGATIVE else 0.0


def _far_from_all(main: Layers, module: Layers, offset: float) -> Iterator[Problem]:
    """Yield the norms of main layers that are far from those of their name in all others."""
    own = _by_kind(module, offset)
    for kind, by_layer in _by_kind(main, offset).items():
        sizes = sorted([*by_layer.values(), *own.get(kind, {}).values()])
        for layer, size in by_layer.items():
            if is_alone(size, sizes):
                nearest, among = (
                    (sizes[-2], "largest") if size == sizes[-1] else (sizes[1], "smallest")
                )
                of_main = f"{among} of the main layers' norms of its name"
                words = balance.norm_of_another_size(f"{layer}.{kind}", size / nearest, of_main)
                yield Problem(f"{layer}.{kind}", words)


def _by_kind(main: Layers, offset: float) -> Mapping[str, Mapping[str, float]]:
    """Return the sizes of norms by their names in layers, and by layer."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for layer, norms in main.items():
        for kind, values in norms.items():
            found[kind][layer] = _size(kind, values, offset)
    return found


def _sizes(module: Layers, main: Layers, offset: float) -> Iterator[Problem]:
    """Yield the norms of the module that are far larger or smaller than all of the main model's of
    their name. None where several of a layer are: scales of the main model's linears may lie in its
    norms. Of a name that it has not, as those before the projection, beside all of its norms."""
    by_kind = _by_kind(main, offset)
    every = [size for sizes in by_kind.values() for size in sizes.values()]
    for layer, norms in module.items():
        found, others = list[Problem](), list[Problem]()
        for kind, values in norms.items():
            theirs = [*by_kind.get(kind, {}).values()]
            size, name = _size(kind, values, offset), f"{layer}.{kind}".lstrip(".")
            if len(theirs) >= _A_PAIR:
                found += _far(name, size, theirs, "main layers' norms of its name")
            elif len(every) >= _A_PAIR and not theirs:
                others += _far(name, size, every, "main model's norms")
        yield from others
        yield from found if len(found) == 1 else ()


def _far(name: str, size: float, theirs: Sequence[float], of_main: str) -> Iterator[Problem]:
    """Yield a norm that is far larger than the largest of some or far smaller than the smallest."""
    for other, among in ((max(theirs), "largest"), (min(theirs), "smallest")):
        factor = size / other
        if factor > gates.NORM_RATIO if among == "largest" else factor * gates.NORM_RATIO < 1:
            words = balance.norm_of_another_size(name, factor, f"{among} of the {of_main}")
            yield Problem(name, words)


def _size(kind: str, values: torch.Tensor, offset: float) -> float:
    """Return the root mean square of what a norm multiplies by."""
    added = 0.0 if any(other in f".{kind}" for other in _OTHER_KINDS) else offset
    return float((values + added).double().square().mean().sqrt())
