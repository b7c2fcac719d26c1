"""The field of a quantization_config that is wrong for a whole part: by another value of it every
tensor is as it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import MtpExportError
from mtp_export.verify.check import Item, failed
from mtp_export.verify.diagnosis.causes import files as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import PartLayout

# Fields by their names in all methods, with the values that tools write.
_VALUES: Mapping[tuple[str, ...], tuple[int, ...]] = {
    ("bits", "w_bit", "num_bits"): (4, 8),
    ("group_size", "q_group_size"): (32, 64, 128, -1),
}
# Of activations, and of single modules.
_OTHERS = frozenset({"input_activations", "output_activations", "dynamic", "extra_config"})


@dataclass(frozen=True)
class _Field:
    """A field with the value that it has, and the one by which the tensors are as stored."""

    name: str
    said: int
    stored: int


def misdescribed(context: Context, layout: PartLayout) -> Item | None:
    """Return the failure of a checkpoint's part that another value of one field describes; None
    where none does, or nothing differs."""
    if context.is_bundle or (field := _field_of(layout)) is None:
        return None
    others = [one for one in context.layouts if one.name != layout.name]
    fits = any(not one.stored.differences(one.checkpoint.tensors) for one in others)
    first = next(one for one in layout.stored.weights.values() if len(one.tensors) > 1)
    return failed(
        f"{layout.name}: precision on disk",
        causes.field_misdescribes(field.name, said=field.said, stored=field.stored, fits=fits),
        # A graft mends what no value does.
        subject=first.tensors[0].name if fits else CONFIG_NAME,
        figure=f"{len(layout.stored.weights):,} weights as by another {field.name}",
    )


def _field_of(layout: PartLayout) -> _Field | None:
    stored, tensors = layout.stored, layout.checkpoint.tensors
    if not isinstance(stored.quantization, dict) or not stored.differences(tensors):
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
