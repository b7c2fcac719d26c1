"""Formats of linears that engines load as one matrix, or compute in one kernel: they must not
differ."""

from __future__ import annotations

from collections.abc import Mapping

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.quantization.method import QuantConfig

EXPERTS = ".experts."  # in names, before the number of an expert

Formats = Mapping[str, WeightFormat | None]


class UnlikeLinears(InvalidInputError):
    """Different formats of linears that are loaded together; left_out is the one, by its module,
    that is not quantized, and quantized the other; "" where both are."""

    left_out = quantized = ""


def split_at_expert(name: str) -> tuple[str, str, str]:
    """Return the name of a layer with experts, that of one of them, and what is behind it; for
    another tensor its name as what is behind."""
    layer, _, expert_name = name.partition(EXPERTS)
    number, _, rest = expert_name.partition(".")
    if not (rest and number.isdecimal()):
        return "", "", name
    return layer, f"{layer}{EXPERTS}{number}", f".{rest}"


def check_fusion_rules(family: ModelSpec, config: QuantConfig, formats: Formats) -> None:
    """Refuse a config.json that gives different formats to linears that are loaded together
    (InvalidInputError). formats are those of the modules; of experts, the first one's."""
    _check_experts(formats)
    _check_fused(family, config, formats)


def _check_fused(family: ModelSpec, config: QuantConfig, formats: Formats) -> None:
    """Refuse linears that engines load as one matrix and that differ, by any of its names."""
    for module, form in formats.items():
        parent, _, last = module.rpartition(".")
        for parts, fused_names in family.patterns.fused.items():
            others = [f"{parent}.{part}" for part in parts[1:]]
            if last != parts[0] or not formats.keys() >= set(others):
                continue
            for other in others:
                if formats[other] != form:
                    raise _unlike({module: form, other: formats[other]})
            if form is None or EXPERTS in module:
                continue
            for fused in (f"{parent}.{name}" for name in fused_names):
                if (actual := config.fused_format(fused, form)) != form:
                    raise _unlike({module: form, fused: actual})


def _check_experts(formats: Formats) -> None:
    """Refuse projections of an expert that differ: one kernel computes all three."""
    for module, form in formats.items():
        if module.endswith(".experts.0.down_proj"):
            up = module.replace("down_proj", "up_proj")
            if formats[up] != form:
                raise _unlike({module: form, up: formats[up]})


def _unlike(formats: Formats) -> InvalidInputError:
    names, actual = " and ".join(formats), " and ".join(map(_words, formats.values()))
    error = UnlikeLinears(
        f"config.json's quantization gives {names} different formats",
        expected="one format: engines load them together",
        found=actual,
        todo="Correct its targets and ignore list; patterns must match fused names too",
    )
    left_out = [name for name, form in formats.items() if form is None]
    if left_out:
        (error.left_out,), (error.quantized,) = left_out, formats.keys() - {*left_out}
    return error


def _words(weight_format: WeightFormat | None) -> str:
    return "not quantized" if weight_format is None else str(weight_format.storage)
