"""Norms beside those of the same name in the main layers: none of the MTP module's is of another
size, and those of one main layer alone are not 1 too small or too large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import FLOATS, Role, TensorSpec
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import balance
from mtp_export.verify.diagnosis.causes import weights as causes

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
    main = _norms(context, context.main, (one for one in specs if one.mtp_layer is None))
    problems = [*_of_one_layer(main, offset)]
    yield verdict("main: norms of the layers alike", problems, counted(len(main), "layer"))
    if context.mtp is not None:
        of_mtp = (one for one in specs if one.mtp_layer is not None)
        module = _norms(context, context.mtp, of_mtp)
        told = context.named_tensors
        found = [one for one in _sizes(module, main, offset) if one.subject not in told]
        count = counted(sum(map(len, module.values())), "norm")
        yield verdict("mtp: norms as large as the main layers'", found, count)


def _norms(context: Context, checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> Layers:
    """Return the norms of a part's layers that are written and not constant."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for spec in specs:
        tensor, (layer, kind) = checkpoint.tensors.get(spec.name), in_layer(spec.name)
        is_norm = spec.role is Role.NORM and len(spec.shape) == 1 and kind.endswith(".weight")
        if tensor is None or not layer or not is_norm or tensor.dtype not in FLOATS:
            continue
        if tensor.name in context.unwritten_tensors:
            continue
        values = read_rows(tensor, 0, tensor.shape[0]).float()
        if values.isfinite().all() and values.min() != values.max():
            found[layer][kind] = values
    return found


def _of_one_layer(main: Layers, offset: float) -> Iterator[Problem]:
    """Yield the norms of the one layer in which all are 1 off, and in no other any."""
    off = {layer: _off_by_one(norms, offset) for layer, norms in main.items()}
    layers = [layer for layer, how in off.items() if how]
    if len(layers) != 1 or len(main) <= _A_PAIR:
        return
    (layer,), how = layers, off[layers[0]]
    if len(own := _of_stream(main[layer])) < _A_PAIR or any(
        _is_so(values, how, offset)
        for other, norms in main.items()
        if other != layer
        for values in _of_stream(norms).values()
    ):
        return
    for kind, values in own.items():
        name = f"{layer}.{kind}"
        if offset:
            median = float(values.median())
            words = causes.norm_off_by_one(name, median, lower=how == "small")
        else:
            words = causes.norm_centred_at_zero(name, float((values < 0).float().mean()))
        yield Problem(name, words)


def _of_stream(norms: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {
        kind: values
        for kind, values in norms.items()
        if not any(other in f".{kind}" for other in _OTHER_KINDS)
    }


def _off_by_one(norms: Mapping[str, torch.Tensor], offset: float) -> str:
    """Return how all norms of a layer are off, "small" or "large"; "" for not."""
    own = _of_stream(norms).values()
    for how in ("small", "large") if offset else ("small",):
        if own and all(_is_so(values, how, offset) for values in own):
            return how
    return ""


def _is_so(values: torch.Tensor, how: str, offset: float) -> bool:
    """Return whether a norm lies where one does that is 1 too small or too large."""
    if how == "large":
        return bool(values.min() >= 0) and float(values.median()) > gates.MEDIAN_NORM
    return float((values + offset < 0).float().mean()) > gates.NEGATIVE_NORM


def _sizes(module: Layers, main: Layers, offset: float) -> Iterator[Problem]:
    """Yield the norms of the module that are far larger or smaller than all of the main layers'."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for norms in main.values():
        for kind, values in norms.items():
            by_kind[kind].append(_size(kind, values, offset))
    for layer, norms in module.items():
        for kind, values in norms.items():
            theirs, own = by_kind.get(kind, []), _size(kind, values, offset)
            if len(theirs) < _A_PAIR:
                continue
            name = f"{layer}.{kind}"
            if own > gates.NORM_RATIO * max(theirs):
                words = balance.norm_of_another_size(name, own / max(theirs), "largest")
                yield Problem(name, words)
            elif own * gates.NORM_RATIO < min(theirs):
                words = balance.norm_of_another_size(name, own / min(theirs), "smallest")
                yield Problem(name, words)


def _size(kind: str, values: torch.Tensor, offset: float) -> float:
    """Return the root mean square of what a norm multiplies by."""
    added = 0.0 if any(other in f".{kind}" for other in _OTHER_KINDS) else offset
    return float((values + added).double().square().mean().sqrt())
