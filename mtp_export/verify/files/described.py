"""The field of config.json or its quantization_config that is wrong for a whole part: by another
value of it, or without it, every tensor is as it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.signs import expert_count
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.reader import MODELOPT_FILE
from mtp_export.progress import counted
from mtp_export.verify.check import MTP_MODULE, Item, failed
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.evidence.parts import PartLayout, layer_count, layout_of

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

# Fields by their names in all methods, with the values that tools write.
_VALUES: Mapping[tuple[str, ...], tuple[int, ...]] = {
    ("bits", "w_bit", "num_bits"): (4, 8),
    ("group_size", "q_group_size"): (32, 64, 128, -1),
}
_EXPERTS = "n_routed_experts"  # of config.json
# Of activations, and of single modules.
_OTHERS = frozenset({"input_activations", "output_activations", "dynamic", "extra_config"})


@dataclass(frozen=True)
class _Field:
    """A field with the value that it has, and the one by which the tensors are as stored."""

    name: str
    said: int
    stored: int


def quantized_by_config_alone(context: Context) -> Item | None:
    """Return the failure of a checkpoint that a quantization_config describes and of which nothing
    is quantized; None for any other."""
    layouts = () if context.is_bundle else context.layouts
    # Of a part whose config cannot be followed nothing is known.
    if not layouts or len(layouts) < len(context.parts) or not all(map(_is_plain, layouts)):
        return None
    weights = counted(sum(len(layout.stored.weights) for layout in layouts), "weight")
    has_file = MODELOPT_FILE in context.files.names()
    return failed(
        "quantization_config",
        causes.nothing_is_quantized(MODELOPT_FILE if has_file else "quantization_config"),
        subject=CONFIG_NAME,
        figure=f"{weights}, none quantized",
    )


def _is_plain(layout: PartLayout) -> bool:
    """Return whether a part differs from its config.json, and without quantization_config not."""
    stored, tensors = layout.stored, layout.checkpoint.tensors
    if not stored.quantization or not stored.differences(tensors):
        return False
    return not stored.reread(None, str).differences(tensors)


def misdescribed(context: Context, layout: PartLayout) -> Item | None:
    """Return the failure of a checkpoint's part that another value of one field describes; None
    where none does, or nothing differs."""
    if context.is_bundle or not layout.stored.differences(layout.checkpoint.tensors):
        return None
    others = [one for one in context.layouts if one.name != layout.name]
    fits = any(not one.stored.differences(one.checkpoint.tensors) for one in others)
    if (experts := _experts_of(context, layout)) is not None:
        return _of_experts(layout, experts, fits=fits)
    if (field := _field_of(layout)) is None:
        return None
    first = next(one for one in layout.stored.weights.values() if len(one.tensors) > 1)
    return failed(
        f"{layout.name}: precision on disk",
        causes.field_misdescribes(field.name, said=field.said, stored=field.stored, fits=fits),
        # A graft mends what no value does.
        subject=first.tensors[0].name if fits else CONFIG_NAME,
        figure=f"{counted(len(layout.stored.weights), 'weight')} as by another {field.name}",
    )


def _experts_of(context: Context, layout: PartLayout) -> _Field | None:
    """Return the number of routed experts by which a part is as stored, if another one is said."""
    config, tensors = layout.checkpoint.config, layout.checkpoint.tensors
    there, said = expert_count(tensors), config.get(_EXPERTS)
    part = context.part(layout.name)
    if there is None or type(said) is not int or said == there or part is None:
        return None
    changed = replace(layout.checkpoint, config={**config, _EXPERTS: there})
    layers = layer_count(context.checkpoints.values())
    try:
        other = layout_of(replace(part, checkpoint=changed), context.target, layers)
    except MtpExportError:
        return None
    return None if other.stored.differences(tensors) else _Field(_EXPERTS, said, stored=there)


def _of_experts(layout: PartLayout, experts: _Field, *, fits: bool) -> Item:
    can_graft = fits and layout.name == MTP and experts.stored < experts.said
    other = MAIN if layout.name == MTP else MTP
    return failed(
        f"{layout.name}: experts",
        causes.experts_misdescribed(
            layout.name,
            other if fits else "",
            experts.name,
            experts.said,
            experts.stored,
            can_graft=can_graft,
        ),
        subject=MTP_MODULE if can_graft else CONFIG_NAME,
        figure=f"{experts.stored} in every layer, {experts.said} said",
    )


def _field_of(layout: PartLayout) -> _Field | None:
    stored, tensors = layout.stored, layout.checkpoint.tensors
    if not isinstance(stored.quantization, dict):
        return None
    for names, values in _VALUES.items():
        said = next(_values(stored.quantization, names), None)
        if said is None:
            continue
        for value in (value for value in values if value != said[1]):
            changed = _changed(stored.quantization, names, value)
            try:
                if not stored.reread(changed, str).differences(tensors):
                    return _Field(*said, stored=value)
            except MtpExportError:  # a value that the method does not have
                continue
    return None


def _values(config: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield a field's name and value wherever a config has it."""
    for key, value in config.items():
        if key in names and type(value) is int:
            yield key, value
        elif isinstance(value, dict) and key not in _OTHERS:
            yield from _values(value, names)


def _changed(config: Mapping[str, Any], names: tuple[str, ...], new: int) -> dict[str, Any]:
    """Return a config with another value of a field, wherever it has it."""

    def one(key: str, value: Any) -> Any:
        if key in names and type(value) is int:
            return new
        nested = isinstance(value, dict) and key not in _OTHERS
        return _changed(value, names, new) if nested else value

    return {key: one(key, value) for key, value in config.items()}
