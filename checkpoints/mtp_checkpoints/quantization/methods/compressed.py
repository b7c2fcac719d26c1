"""compressed-tensors: modules are left out by `ignore`, and groups of targets have a format each.

Sources: vLLM and SGLang `quantization/compressed_tensors`. They look at `ignore` before groups, at
names before classes, and take the first name that matches.

A pattern is a regular expression matched from a module name's start. Patterns for the MTP layer
stay unescaped: SGLang replaces the literal `model.layers.61` in them by its draft's own name. In
configs of the families for which it does not, the layer stands under both names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mtp_checkpoints.dtypes import SCALE_DTYPES
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role, weight_name
from mtp_checkpoints.families.spec import PLAIN_HEADS, ModelSpec
from mtp_checkpoints.formats import (
    Fp8Block,
    Int8Channel,
    MxFp4Packed,
    MxFp8,
    NvFp4Packed,
    NvFp4PackedA4,
    Unquantized,
    WeightFormat,
    formats_described_by,
    has_groups,
)
from mtp_checkpoints.formats.compressed import WeightsEntry
from mtp_checkpoints.quantization.entry_patterns import entry_pattern
from mtp_checkpoints.quantization.method import Method, PartStorage, WrittenModel
from mtp_checkpoints.quantization.native import (
    COMPRESSED,
    NATIVE_FP8,
    Config,
    field_of,
    native_fp8,
    unusable_field,
)

# Roles of linears to loaders that go by class; no release quantizes the last two.
_LINEAR_BY_CLASS = (*LINEAR_ROLES, Role.HEAD, Role.MTP_PROJECTION)
_REGEX = "re:"
_CLASS = "Linear"
_IGNORE, _CACHE = "ignore", "kv_cache_scheme"
_GROUPS, _LAYOUT, _MIXED = "config_groups", "format", "mixed-precision"
_LINEAR_FP8 = {key: value for key, value in NATIVE_FP8.items() if key != "fmt"}


@dataclass(frozen=True)
class _Compressed:
    """A module is ignored, or has the format of the first target that matches its name, or else
    that of its class. With linear_fp8 (SGLang) this holds for experts alone."""

    ignore: tuple[str, ...]
    targets: tuple[tuple[str, WeightFormat], ...]
    linear_fp8: WeightFormat | None
    loads_together: ClassVar[bool] = True

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in _LINEAR_BY_CLASS:
            return None
        if self.linear_fp8 is not None and role is not Role.ROUTED_EXPERT:
            return self.linear_fp8 if role in LINEAR_ROLES else None
        if _matches_any(module, self.ignore):
            return None
        return self._by_name(module) or self._by_class()

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        if self.linear_fp8 is not None:
            return parts
        if _matches_any(fused, self.ignore):
            return None
        return self._by_name(fused) or self._by_class() or parts

    def _by_name(self, module: str) -> WeightFormat | None:
        return next((form for target, form in self.targets if _matches(module, target)), None)

    def _by_class(self) -> WeightFormat | None:
        return next((form for target, form in self.targets if target == _CLASS), None)


def _matches(module: str, pattern: str) -> bool:
    """Match a whole name, or a regular expression from a name's start."""
    if pattern.startswith(_REGEX):
        return entry_pattern(pattern.removeprefix(_REGEX)).matches(module)
    return pattern == module


def _matches_any(module: str, patterns: Iterable[str]) -> bool:
    return any(_matches(module, pattern) for pattern in patterns)


# --- Reading --------------------------------------------------------------------------------------


def _is_fp8(cache: object) -> bool:
    """Return whether keys and values are cached in fp8, which changes no weight."""
    numbers = (cache.get("num_bits"), cache.get("type")) if isinstance(cache, dict) else ()
    return numbers == (8, "float")


def _read(quantization: Mapping[str, Any]) -> _Compressed:
    config = field_of(quantization)
    for key in ("sparsity_config", "transform_config", _CACHE):
        if quantization.get(key) and not (key == _CACHE and _is_fp8(quantization[key])):
            raise UnsupportedError(
                f"config.json's {config} has a {key}, which this tool does not read",
                expected="none",
                found=repr(quantization[key])[:100],
            )
    groups = quantization.get(_GROUPS)
    if not isinstance(groups, dict) or not groups:
        raise unusable_field(_GROUPS, "an object with one group or more", groups, config)
    targets: list[tuple[str, WeightFormat]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise unusable_field(f"{_GROUPS}.{name}", "an object", group, config)
        form = _group_format(name, group, quantization)
        own = _listed_patterns(f"{_GROUPS}.{name}.targets", group, config)
        targets += [(target, form) for target in own]
    linear_fp8 = None
    if quantization.get("linear_fp8_config") is not None:
        native_fp8(quantization["linear_fp8_config"])
        linear_fp8 = Fp8Block(scale_dtypes=SCALE_DTYPES)
    ignored = _listed_patterns(_IGNORE, quantization, config)
    return _Compressed(tuple(ignored), tuple(targets), linear_fp8)


def _listed_patterns(key: str, holder: Mapping[str, Any], config: str) -> Sequence[str]:
    """Return a list of names and patterns, all of them valid; config: the name of what has it."""
    listed = holder.get(key.rpartition(".")[2]) or []
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise unusable_field(key, "a list of module names and re: patterns", listed, config)
    for entry in listed:
        try:
            entry_pattern(entry.removeprefix(_REGEX) if entry.startswith(_REGEX) else "")
        except re.error as error:
            found = f"{entry}: {error}"
            raise unusable_field(key, "regular expressions after re:", found, config) from error
    return listed


def _group_format(
    name: str, group: Mapping[str, Any], quantization: Mapping[str, Any]
) -> WeightFormat:
    """Return the format of a group of a config, whose own layout is for all groups."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        key = f"{_GROUPS}.{name}.weights"
        raise unusable_field(key, "an object", weights, field_of(quantization))
    entry = WeightsEntry.of(group, quantization.get(_LAYOUT))
    if entry is not None:
        for known in formats_described_by(COMPRESSED):
            if (described := known.of_entry(entry)) is not None:
                return described
    *most, last = (known.in_words for known in formats_described_by(COMPRESSED))
    symmetric = "" if weights.get("symmetric") is True else " without symmetric true"
    raise UnsupportedError(
        f"config_groups.{name} of config.json describes weights that this tool does not read",
        expected=f"{', '.join(most)}, or {last}; without actorder group",
        found=f"format {group.get(_LAYOUT) or quantization.get(_LAYOUT)}, {weights.get('type')}"
        f"{weights.get('num_bits')}{symmetric}, strategy {weights.get('strategy')},"
        f" group_size {weights.get('group_size')}",
    )


# --- Beside a draft -------------------------------------------------------------------------------


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    return _ignoring(quantization, map(_below, modules))


def _ignoring(quantization: Config, patterns: Iterable[str]) -> Config:
    listed = quantization.get(_IGNORE) or []
    return {**quantization, _IGNORE: list(dict.fromkeys([*listed, *patterns]))}


def _below(module: str) -> str:
    """Return a pattern for a module and all below it."""
    return rf"{_REGEX}{module}(\..*)?$"


def _describe(quantization: Config, family: ModelSpec, draft: PartStorage) -> Config:
    """Return a config with a group, before all others, for each storage of a draft's linears; its
    other matrices are left out."""
    of_draft = {
        f"mtp_{storage}": {
            "targets": _draft_linears(family, draft, storage),
            **draft.group(storage),
        }
        for storage in dict.fromkeys(draft.storages.values())
        if storage != Unquantized.storage
    }
    usual = quantization.get(_LAYOUT)
    others = {
        name: {**group, _LAYOUT: group.get(_LAYOUT) or usual}
        for name, group in quantization[_GROUPS].items()
    }
    groups = {**of_draft, **others}
    layouts = {group[_LAYOUT] for group in groups.values()}
    matrices = [name for name in family.patterns.other_matrices if name.startswith(_REGEX)]
    single = [_below(name) for name in _plain_linears(family, draft)]
    plain = [*matrices, *single, *_draft_linears(family, draft, Unquantized.storage)]
    layout = usual if layouts == {usual} else _MIXED
    return {**_ignoring(quantization, plain), _LAYOUT: layout, _GROUPS: groups}


def _draft_linears(family: ModelSpec, draft: PartStorage, storage: str) -> list[str]:
    """Return patterns for the draft's linears in a storage, fused ones included."""
    there = {spec.role for spec in family.mtp_tensors.values()}
    return [
        f"{_REGEX}{layer}.{modules}"
        for role, modules in family.patterns.linears.items()
        if draft.storages[role] == storage and role in there
        for layer in _mtp_names(family)
    ]


def _plain_linears(family: ModelSpec, draft: PartStorage) -> list[str]:
    """Return the draft's linears that are not quantized though others of their role are, by each
    name that engines have for them."""
    plain = (
        name
        for spec in family.mtp_tensors.values()
        if spec.is_linear_weight
        and draft.storages[spec.role] != Unquantized.storage
        and draft.storage_of(spec) in (None, Unquantized.storage)
        for name in family.names_of(spec.module, spec.mtp_layer)
    )
    return list(dict.fromkeys(plain))


def _mtp_names(family: ModelSpec) -> list[str]:
    """Return the names of the MTP layers in the release and in engines."""
    return [*(module.layer.prefix for module in family.mtp), *family.mtp_names]


# --- Writing --------------------------------------------------------------------------------------


def _packs_attention(model: WrittenModel) -> bool:
    plain = Unquantized.storage
    return has_groups(
        [part.storages.get(Role.ATTENTION, plain) for part in (model.main, model.mtp)]
    )


def _write(model: WrittenModel) -> Config:
    """Return a config with one group per storage, and one of quantized heads.

    One group holds the class Linear, for every linear that no pattern names: fp8, else the first of
    the others. No loader finds a head by it. All loaders look at names before classes. SGLang looks
    at the class for int4 experts, beside which it must not fuse the shared expert into them;
    transformers takes the first group that names experts for them, and the first that does not for
    every other linear, a head too: its group is the last one.
    """
    patterns, head = _patterns(model), model.main.storages.get(Role.HEAD)
    heads = () if head is None else _heads(model.family)
    others = model.family.patterns.other_matrices
    ignored = [name for name in others if not heads or name not in PLAIN_HEADS]
    ignored += patterns.pop(Unquantized.storage, [])
    native = model.dialect.native_fp8 and Fp8Block.storage in patterns
    if native:
        option = f"--target {model.dialect.name}"
        model.check_nothing_left_out(option)
        model.check_no_plain_matrices(option)
        del patterns[Fp8Block.storage]
    elif Fp8Block.storage in patterns or _packs_attention(model):
        of_mtp = model.family.vllm.plain_linears  # alone
        in_bf16 = dict.fromkeys((*model.main.bf16_modules, *model.mtp.bf16_modules))
        ignored += [f"re:.*{name}$" for name in in_bf16 if name not in of_mtp]
        plain = _plain_linears(model.family, model.mtp)
        ignored += [name for name in plain if name.rpartition(".")[2] in of_mtp]
    if model.native is not None:
        ignored += [_left_out(name, heads) for name in model.native.left_out]
    groups = _groups_of_linears(patterns, model)
    if head is not None:
        groups.append(_group(head, [*heads], model))
    layouts = {group[_LAYOUT] for group in groups}
    config: Config = {
        "quant_method": COMPRESSED,
        _LAYOUT: _MIXED if len(layouts) > 1 else layouts.pop(),
        "quantization_status": "compressed",
        _CACHE: None,
        _IGNORE: ignored,
        _GROUPS: {f"group_{number}": group for number, group in enumerate(groups)},
    }
    if native:
        config["linear_fp8_config"] = _LINEAR_FP8
    return config


def _heads(family: ModelSpec) -> tuple[str, ...]:
    """Return names and patterns of heads (UnsupportedError where no engine loads their codes)."""
    if not family.patterns.heads:
        raise UnsupportedError(
            "vLLM finds this model's head by the name of its plain weight alone",
            expected="--head-quant keep",
            found=weight_name(family.head),
        )
    return family.patterns.heads


def _groups_of_linears(patterns: Mapping[str, list[str]], model: WrittenModel) -> list[Config]:
    """Return the groups of quantized linears, given the patterns of each storage."""
    groups_of = (known.storage for known in formats_described_by(COMPRESSED))
    order = [storage for storage in groups_of if storage in patterns]
    if not order:
        return []
    for_the_rest = Fp8Block.storage if Fp8Block.storage in order else order[0]
    by_class = for_the_rest == Fp8Block.storage or len(order) == 1
    targets = {**patterns, for_the_rest: [_CLASS, *([] if by_class else patterns[for_the_rest])]}
    return [_group(storage, targets[storage], model) for storage in order]


def _left_out(module: str, heads: Sequence[str]) -> str:
    """Return a pattern for a module that a release left out of fp8 and all below it, but for heads
    that are quantized."""
    names = "|".join(head.removeprefix(_REGEX).removesuffix("$") for head in heads)
    but_heads = f"(?!({names})$)" if heads else ""
    return rf"{_REGEX}{but_heads}(.*\.)?{module}(\..*)?$"


def _patterns(model: WrittenModel) -> dict[str, list[str]]:
    """Return per storage the patterns of its linears; no module matches two."""
    layers = _mtp_names(model.family)
    but_mtp = "|".join(f"{layer}." for layer in layers)
    of_mtp = {spec.role for spec in model.family.mtp_tensors.values()}
    result: dict[str, list[str]] = {}

    def add(storage: str, patterns: Iterable[str]) -> None:
        result.setdefault(storage, []).extend(patterns)

    for role, modules in model.family.patterns.linears.items():
        main, mtp = model.main.storages[role], model.mtp.storages[role]
        if main == mtp or role not in of_mtp:
            add(main, [f"re:.*{modules}"])
        else:
            add(main, [f"re:(?!{but_mtp}).*{modules}"])
            add(mtp, [f"re:{layer}.{modules}" for layer in layers])
    return result


def _group(storage: str, targets: list[str], model: WrittenModel) -> Config:
    part = next(part for part in (model.main, model.mtp) if storage in part.storages.values())
    return {"targets": targets, **part.group(storage)}


COMPRESSED_TENSORS = Method(
    _read,
    leave_out=_leave_out,
    describe=_describe,
    describes=frozenset(
        form.storage
        for form in (Int8Channel, Fp8Block, NvFp4Packed, NvFp4PackedA4, MxFp4Packed, MxFp8)
    ),
    write=_write,
    in_groups=True,
)
