"""The field of config.json or its quantization_config that is wrong for a whole part: by another
value of it, or without it, every tensor is as it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME, QUANTIZATION, quantization_field
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.signs import NESTED, expert_count, expert_field
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.layouts.llama_cpp import LLAMA_CPP
from mtp_checkpoints.quantization.methods import undecoded_of
from mtp_checkpoints.quantization.native import (
    field_of,
    quantization_of,
    replaced_quantization,
)
from mtp_checkpoints.quantization.undecoded import Undecoded
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.reader import MODELOPT_FILE
from mtp_export.progress import counted
from mtp_export.verify.check import MTP_MODULE, Item, failed
from mtp_export.verify.diagnosis.causes import configs as causes
from mtp_export.verify.evidence.other_config import with_value_at
from mtp_export.verify.evidence.parts import Part, PartLayout, layer_count, layout_of
from mtp_export.verify.files.left_out import ListedDraft

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_BLOCK_SIZE = "weight_block_size"
# Fields by their names in all methods, with the values that tools write.
_VALUES: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("bits", "w_bit", "num_bits"): (4, 8),
    ("group_size", "q_group_size"): (32, 64, 128, -1),
    ("type",): ("int", "float"),
    ("strategy",): ("channel", "group"),
    (_BLOCK_SIZE,): ([BLOCK, BLOCK],),
}
# Of activations, and of single modules.
_OTHERS = frozenset(
    {"input_activations", "output_activations", "kv_cache_scheme", "dynamic", "extra_config"}
)


@dataclass(frozen=True)
class _Field:
    """A field with the value that it has, and the one by which the tensors are as stored."""

    name: str
    said: Any
    stored: Any


def undecoded_main(context: Context) -> Undecoded | None:
    """Return the quantization of a main model whose numbers are not decoded, and that the bundle
    says a graft kept so; None for any other."""
    if not context.is_bundle or context.main is None:
        return None
    known = undecoded_of(context.main.config)
    return known if known and context.recorded("main_quant_method") == known.name else None


def misdescribed_by_config(context: Context) -> Item | None:
    """Return the failure of a checkpoint that another config.json describes; None for any other."""
    other = context.other_config
    if other is None:
        return None
    words = causes.text_part_elsewhere(other.found, other.place)
    if other.values:
        values = [(v.field, v.said, v.stored) for v in other.values]
        words = causes.values_misdescribe(values, other.folder)
        words += of_keys(context)
    tensors = counted(sum(len(one.tensors) for one in context.checkpoints.values()), "tensor")
    return failed("config.json", words, subject=CONFIG_NAME, figure=f"{tensors} as by another one")


def of_keys(context: Context) -> str:
    """Return what is said of the fields of a config.json that the keys of a GGUF file stand for;
    "" of any other."""
    is_of_keys = context.target.name == LLAMA_CPP.name and CONFIG_NAME not in context.files.names()
    return causes.OF_KEYS if is_of_keys else ""


def quantization_elsewhere(context: Context) -> Item | None:
    """Return the failure of a checkpoint whose quantization_config is in its text part alone; None
    for any other."""
    main = None if context.is_bundle else context.main
    if main is None or quantization_of(main.config) is not None:
        return None
    nested = [
        (name, field)
        for name in NESTED
        if isinstance(inner := main.config.get(name), Mapping)
        and inner.get(field := quantization_field(inner))
    ]
    if not nested:
        return None
    words = causes.quantization_elsewhere(*nested[0])
    return failed(QUANTIZATION, words, subject=CONFIG_NAME)


def quantized_by_config_alone(context: Context) -> Item | None:
    """Return the failure of a checkpoint that a quantization_config describes and of which nothing
    is quantized; None for any other."""
    layouts = () if context.is_bundle else context.layouts
    # Of a part whose config cannot be followed nothing is known.
    if not layouts or len(layouts) < len(context.parts) or not all(map(_is_plain, layouts)):
        return None
    weights = counted(sum(len(layout.stored.weights) for layout in layouts), "weight")
    has_file = MODELOPT_FILE in context.files.names()
    field = field_of(layouts[0].stored.quantization)
    return failed(
        QUANTIZATION,
        causes.nothing_is_quantized(MODELOPT_FILE if has_file else field),
        subject=CONFIG_NAME,
        figure=f"{weights}, none quantized",
    )


def quantized_without_config(context: Context) -> Item | None:
    """Return the failure of a checkpoint with both parts quantized whose config.json does not
    say how; None for any other."""
    if context.is_bundle or any(layout.stored.quantization for layout in context.layouts):
        return None
    parts = [
        ListedDraft(layout.stored, layout.checkpoint.tensors, {}, ()).quantized
        for layout in context.layouts
    ]
    if not all(parts) or len(parts) < len(context.parts) or len(parts) < 2:
        return None
    count = sum(map(len, parts))
    return failed(
        QUANTIZATION,
        causes.no_quantization_config(count, parts[0][0]),
        subject=CONFIG_NAME,
        figure=f"{count:,} matrices quantized",
    )


def _is_plain(layout: PartLayout) -> bool:
    """Return whether a part differs from its config.json, and without quantization_config not."""
    if not layout.stored.quantization or not layout.differences:
        return False
    return not layout.stored.reread(None, str).differences(layout.checkpoint.tensors)


def misdescribed(context: Context, layout: PartLayout) -> Item | None:
    """Return the failure of a checkpoint's part that another value of one field describes; None
    where none does, or nothing differs."""
    if context.is_bundle or not layout.differences:
        return None
    if (experts := _experts_of(context, layout)) is not None:
        return _of_experts(layout, experts, fits=_other_fits(context, layout.name))
    part = context.part(layout.name)
    return None if part is None else misdescribed_by_a_field(context, part)


def misdescribed_by_a_field(context: Context, part: Part) -> Item | None:
    """Return the failure of a checkpoint's part that another value of one field of its
    quantization_config describes; None where none does. The config may be one that is not read."""
    if context.is_bundle or (found := _field_of(context, part)) is None:
        return None
    field, layout = found
    fits = _other_fits(context, part.name)
    first = next((one for one in layout.stored.weights.values() if len(one.tensors) > 1), None)
    if first is None:  # of what is not quantized no field tells
        return None
    return failed(
        f"{part.name}: precision on disk",
        causes.field_misdescribes(
            field_of(layout.stored.quantization),
            field.name,
            said=field.said,
            stored=field.stored,
            fits=fits,
        ),
        # A graft mends what no value does.
        subject=first.tensors[0].name if fits else CONFIG_NAME,
        figure=f"{counted(len(layout.stored.weights), 'weight')} as by another {field.name}",
    )


def _other_fits(context: Context, name: str) -> bool:
    """Return whether a part of another name is as its config.json describes it."""
    others = [one for one in context.layouts if one.name != name]
    return any(not one.differences for one in others)


def _experts_of(context: Context, layout: PartLayout) -> _Field | None:
    """Return the number of routed experts by which a part is as stored, if another one is said."""
    config, tensors = layout.checkpoint.config, layout.checkpoint.tensors
    there, said = expert_count(tensors), expert_field(config)
    part = context.part(layout.name)
    if there is None or said is None or said[1] == there or part is None:
        return None
    fits = _layout_by(context, part, with_value_at(config, said[0].split("."), there))
    return None if fits is None else _Field(*said, stored=there)


def _layout_by(context: Context, part: Part, config: dict[str, Any]) -> PartLayout | None:
    """Return what a part holds by another config.json; None where it is not so, or that cannot be
    followed."""
    assert part.checkpoint is not None, "asked for a part that could not be opened"
    changed = replace(part, checkpoint=replace(part.checkpoint, config=config))
    try:
        layout = layout_of(changed, context.target, layer_count(context.checkpoints.values()))
    except MtpExportError:
        return None
    return None if layout.stored.differences(part.checkpoint.tensors) else layout


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


def _field_of(context: Context, part: Part) -> tuple[_Field, PartLayout] | None:
    """Return the field by another value of which a part is as stored, and what it then holds."""
    config = part.checkpoint.config if part.checkpoint is not None else {}
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return None
    for names, values in _VALUES.items():
        name, said = next(_values(quantization, names), (names[0], None))
        if said is None and name != _BLOCK_SIZE:  # which alone is left out by mistake
            continue
        for value in (value for value in values if value != said):
            changed = _changed(quantization, names, value)
            if said is None:
                changed |= {name: value}
            layout = _layout_by(context, part, replaced_quantization(config, changed))
            if layout is not None:
                return _Field(name, said, stored=value), layout
    return None


def _values(config: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield a field's name and value wherever a config has it."""
    for key, value in config.items():
        if key in names and not isinstance(value, dict):
            yield key, value
        elif isinstance(value, dict) and key not in _OTHERS:
            yield from _values(value, names)


def _changed(config: Mapping[str, Any], names: tuple[str, ...], new: Any) -> dict[str, Any]:
    """Return a config with another value of a field, wherever it has it."""

    def one(key: str, value: Any) -> Any:
        if key in names and not isinstance(value, dict):
            return new
        nested = isinstance(value, dict) and key not in _OTHERS
        return _changed(value, names, new) if nested else value

    return {key: one(key, value) for key, value in config.items()}
