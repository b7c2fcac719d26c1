"""The list of a quantization_config that leaves modules unquantized, compared with how the MTP
modules are stored: which modules it lacks, or which entry is one too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.base import FLOATS, Role, TensorSpec
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.quantization.method import modules_of
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.evidence.parts import PartLayout

_SHOWN = 300  # characters of what must be added


def item(layout: PartLayout) -> Item:
    """The item of a draft whose config.json describes the model that it is stored beside."""
    unquantized, quantized = [], []
    tensors, weights = layout.checkpoint.tensors, list(layout.stored.weights.values())
    for weight in weights:
        if len(weight.weight.shape) != 2:
            continue
        plain = _is_plain(weight, tensors)
        if plain and weight.format is not UNQUANTIZED:
            unquantized.append(weight)
        elif plain is False and weight.format is UNQUANTIZED:
            quantized.append(weight)
    problems = [*_lacking(layout, unquantized), *_too_many(layout, quantized)]
    for weight in weights:
        is_projection = weight.weight.role is Role.MTP_PROJECTION
        if is_projection and _is_plain(weight, tensors) is False:
            words = causes.projection_quantized(weight.weight.module)
            problems.append(Problem(weight.tensors[0].name, words))
    return verdict("mtp: left out of quantization as stored", problems, f"{len(weights):,} weights")


def _is_plain(weight: StoredWeight, tensors: Mapping[str, TensorInfo]) -> bool | None:
    """True for a matrix that is stored unquantized, None for one that is there in no form."""
    module = weight.tensors[0].name.rpartition(".")[0]
    tensor = tensors.get(f"{module}.weight")
    if tensor is not None:
        return tensor.dtype in FLOATS
    codes = (f"{module}.{last}" for last in ("weight_packed", "qweight"))
    return False if any(name in tensors for name in codes) else None


def _lacking(layout: PartLayout, weights: list[StoredWeight]) -> Iterator[Problem]:
    """The modules that an engine would build quantized and that are not, all in one problem."""
    if not weights:
        return
    quantization: Any = layout.stored.quantization
    modules = modules_of(weight.weight for weight in weights)
    leave_out = METHODS[quantization["quant_method"]].leave_out
    added = ""
    if leave_out is not None:
        added = ", ".join(_added(quantization, leave_out(quantization, _heads(weights, layout))))
    words = causes.not_left_out(len(weights), modules[0], added[:_SHOWN])
    yield Problem(weights[0].tensors[0].name, words)


def _heads(weights: list[StoredWeight], layout: PartLayout) -> list[str]:
    """The MTP layers' own names, where all that is stored of their linears is unquantized; else
    the modules'."""
    own = {weight.weight.name for weight in weights}
    linears = [one.weight for one in layout.stored.weights.values() if one.weight.is_linear_weight]
    if all(spec.name in own for spec in linears):
        return list(dict.fromkeys(f"model.layers.{spec.mtp_layer}" for spec in linears))
    return modules_of(weight.weight for weight in weights)


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Entries of lists and objects in a quantization_config that another has nowhere."""
    old = {*_entries(before)}
    for key, value in after.items():
        if not isinstance(value, list | dict):
            continue
        if more := [one for one in value if isinstance(one, str) and one not in old]:
            yield f"{', '.join(more)} to {key}"


def _entries(value: object) -> Iterator[str]:
    """Every entry of the lists and objects in a value."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list):
        yield from map(str, value)


def _too_many(layout: PartLayout, weights: list[StoredWeight]) -> Iterator[Problem]:
    """Quantized modules that an engine would build unquantized, by the entry that is to blame."""
    by_entry: dict[str, list[StoredWeight]] = {}
    for weight in weights:
        entry = _to_blame(layout.stored.quantization, weight.weight)
        by_entry.setdefault(entry, []).append(weight)
    for entry, alike in by_entry.items():
        words = causes.left_out_though_quantized(len(alike), alike[0].weight.module, entry)
        yield Problem(alike[0].tensors[0].name, words)


def _to_blame(quantization: Any, spec: TensorSpec) -> str:
    """The entry without which a module would be quantized; "" where no single one is."""
    for key, value in quantization.items() if isinstance(quantization, dict) else ():
        for entry in value if isinstance(value, list | dict) else ():
            rest: Any = [one for one in value if one != entry]
            if isinstance(value, dict):
                rest = {name: value[name] for name in rest}
            try:
                config = quant_config_of({**quantization, key: rest})
                form = config.format_of(spec.module, spec.role)
            except MtpExportError:
                continue
            if form is not None:
                return f"{entry} in {key}"
    return ""
