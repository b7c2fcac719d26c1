"""Readings of others' quantization_config by vLLM and SGLang, where they are not what its method
says: fields that they refuse, entries that reach no module of theirs, and linears that they
find by the tensors.

Sources: vLLM 0.32.0 and SGLang 0.5.23, whose code tests/engines/test_foreign_readers.py executes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import WHOLE_ROW
from mtp_checkpoints.quantization.absent import with_absent_listed
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.methods.bitsandbytes import SKIPPED
from mtp_checkpoints.quantization.methods.gptq import BLOCKS, PERMUTED
from mtp_checkpoints.quantization.methods.quark import NAMED
from mtp_checkpoints.quantization.native import (
    Config,
    method_of,
    quantization_of,
    replaced_quantization,
)
from mtp_checkpoints.quantization.sglang_quark import quark_of_sglang
from mtp_checkpoints.quantization.vllm_gptq import with_others_names_out

_AUTO_ROUND_FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_FP8_LISTS = ("ignored_layers", "modules_to_not_convert")  # in vLLM's order
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")

_EXPERTS = EXPERTS.rstrip(".")
_NEVER_ASKED = (Role.ATTENTION_GATES, Role.INDEXER_HEADS)

Reads = Callable[[Mapping[str, Any], Collection[str]], Config]


def as_it_is(config: Mapping[str, Any], _: Collection[str]) -> Config:
    """Return a config.json for an engine that takes it by its words."""
    return dict(config)


def with_renamed_entries(config: Mapping[str, Any], draft: EngineDraft) -> Config:
    """Return a config.json with the entries of its lists as a class of drafts renames them."""
    quantization = quantization_of(config)
    if not draft.listed or method_of(quantization) not in draft.renames:
        return dict(config)
    return replaced_quantization(config, _renamed(quantization, draft.entry_of))


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a value in which every string is renamed, keys too."""
    if isinstance(value, Mapping):
        return {rename(key): _renamed(one, rename) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, rename) for one in value]
    return rename(value) if isinstance(value, str) else value


def vllm_reads(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json, in the words of its method, that means what vLLM takes it for in a
    folder with these tensors.

    Raises UnsupportedError for one that vLLM refuses, and what with_absent_listed raises.
    """
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return dict(config)
    match method_of(quantization):
        case "gptq":
            _check_gptq_of_vllm(quantization)
        case "auto-round":
            _check_auto_round("vLLM 0.32.0", quantization)
            quantization = _with_ends_as_patterns(quantization)
        case "compressed-tensors":
            _check_no_null("vLLM 0.32.0", quantization, "ignore")
            _check_activations(quantization)
            _check_symmetric(quantization)
            quantization = _with_heads_by_name(config, quantization)
        case "fp8":
            quantization = _with_whole_linears(config, quantization)
        case "modelopt":
            _check_no_null("vLLM 0.32.0", quantization, "ignore", "exclude_modules")
        case "quark":
            _check_quark(quantization)
    read = with_absent_listed(replaced_quantization(config, quantization), tensors)
    return with_others_names_out(read, tensors) if method_of(quantization) == "gptq" else read


def sglang_reads(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json, in the words of its method, that means what SGLang takes it for in a
    folder with these tensors.

    Raises UnsupportedError for one that SGLang refuses, InvalidInputError for a draft that no entry
    of it can describe, and what family_of raises.
    """
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return dict(config)
    match method_of(quantization):
        case "gptq":
            if quantization.get("sym") is False:
                raise _refused("SGLang 0.5.23", "sym true beside routed experts", "sym false")
            _check_experts_of_sglang(config, tensors)
            quantization = {k: v for k, v in quantization.items() if k != BLOCKS}
            dynamic = {r"+:.*\.experts$": {}, **(quantization.get("dynamic") or {})}
            quantization = {**quantization, "dynamic": dynamic}
        case "auto-round":
            _check_auto_round("SGLang 0.5.23", quantization)
            quantization = _with_whole_patterns(quantization)
        case "compressed-tensors":
            _check_no_null("SGLang 0.5.23", quantization, "ignore")
        case "modelopt":
            if "NVFP4" in str(_nested(quantization).get("quant_algo")).upper():
                _check_no_null("SGLang 0.5.23", quantization, "ignore", "exclude_modules")
            quantization = _with_reached_names(config, quantization)
        case "quark":
            _check_quark(quantization)
            quantization = quark_of_sglang(config, quantization)
        case "bitsandbytes":
            _check_bitsandbytes_of_sglang(config, quantization, tensors)
            quantization = _with_components(config, quantization, tensors)
    return replaced_quantization(config, quantization)


# --- What they refuse -----------------------------------------------------------------------------


class NotTriedError(UnsupportedError):
    """Nothing of an engine was executed with such a config: no one knows how it reads it."""


def _refused(engine: str, expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"{engine} does not load a checkpoint by this quantization",
        expected=expected,
        found=found,
    )


def _check_gptq_of_vllm(quantization: Config) -> None:
    if quantization.get("sym") is False:
        raise _refused("vLLM 0.32.0", "GPTQ with sym true", "sym false")
    if quantization.get(PERMUTED) and quantization.get("group_size") != WHOLE_ROW:
        raise _refused("vLLM 0.32.0", "GPTQ with desc_act false", "desc_act true")


def _check_experts_of_sglang(config: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Refuse a draft with unquantized experts: SGLang's method of experts asks no rule."""
    if (plain := _plain_expert(config, tensors)) is not None:
        raise InvalidInputError(
            "SGLang builds every expert of a GPTQ model quantized, whatever dynamic says",
            expected="experts in GPTQ's int4 too",
            found=f"{plain}, unquantized",
            todo="Serve it with vLLM, or give SGLang the MTP layer in a folder of its own, whose"
            " config.json has no quantization_config: mtp-export graft makes one",
        )


def _plain_expert(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    specs = family_of(config, tensors).mtp_tensors.values()
    experts = (spec.name for spec in specs if spec.role is Role.ROUTED_EXPERT)
    return next((name for name in experts if name in tensors), None)


def _check_bitsandbytes_of_sglang(
    config: Mapping[str, Any], quantization: Config, tensors: Collection[str]
) -> None:
    """Refuse what its class of experts does not load: it asks no list, and has no 8 bits."""
    every = family_of(config, tensors).tensors.values()
    if not any(spec.role is Role.ROUTED_EXPERT for spec in every):
        return
    if quantization.get("load_in_8bit"):
        raise _refused("SGLang 0.5.23", "4 bits beside routed experts", "load_in_8bit")
    plain = _plain_expert(config, tensors)
    if plain is not None and _is_plain(plain, tensors):
        raise _refused(
            "SGLang 0.5.23", "experts in bitsandbytes' codes too", f"{plain}, unquantized"
        )


def _is_plain(name: str, tensors: Collection[str]) -> bool:
    """Return whether a weight of bitsandbytes' has no constants beside it."""
    return not any(
        one in tensors for one in (f"{name}.absmax", f"{name.removesuffix('weight')}SCB")
    )


def _check_auto_round(engine: str, quantization: Config) -> None:
    packing = quantization.get("packing_format")
    if quantization.get("data_type", "int") == "int" and packing not in _AUTO_ROUND_FORMATS:
        expected = f"packing_format {' or '.join(_AUTO_ROUND_FORMATS)}"
        raise _refused(engine, expected, f"packing_format {packing}")


def _check_no_null(engine: str, quantization: Config, *keys: str) -> None:
    for holder in (quantization, _nested(quantization)):
        for key in keys:
            if key in holder and holder[key] is None:
                raise _refused(engine, f"a list as {key}, or no such field", f"{key} null")


def _check_activations(quantization: Config) -> None:
    """Refuse integers in int-quantized whose activations stay as they are."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        layout = group.get("format") or quantization.get("format")
        weights = group.get("weights") or {}
        if (layout, weights.get("type")) == ("int-quantized", "int") and not group.get(
            "input_activations"
        ):
            raise _refused(
                "vLLM 0.32.0",
                "format pack-quantized for integers whose activations are not quantized",
                "format int-quantized without input_activations",
            )


def _check_symmetric(quantization: Config) -> None:
    """Say of integers with zero points that nothing of vLLM was executed with them."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if (group.get("weights") or {}).get("symmetric") is False:
            raise NotTriedError(
                "What vLLM 0.32.0 makes of experts with zero points was not tried",
                expected="symmetric true",
                found="symmetric false",
            )


def _check_quark(quantization: Config) -> None:
    """Refuse what the classes of both engines end on: they look in what Quark says of its export
    for the layers whose keys and values are quantized, [] of none, and then for their numbers."""
    exported, key = quantization.get("export"), "export.kv_cache_group"
    layers = exported.get("kv_cache_group") if isinstance(exported, dict) else None
    named = quantization.get(NAMED)
    named = named if isinstance(named, dict) else {}
    if not isinstance(layers, list):
        wanted, found = f"a list as {key}, [] for none", "no such list"
    elif layers and not any(fnmatchcase(name, one) for name in named for one in map(str, layers)):
        wanted, found = f"the numbers of {key} in {NAMED}", f"none for {layers}"
    else:
        return
    raise InvalidInputError(
        "vLLM 0.32.0 and SGLang 0.5.23 end on this quantization_config of Quark",
        expected=wanted,
        found=found,
        todo="Put the one back that Quark wrote",
    )


def _nested(quantization: Config) -> Config:
    """Return what ModelOpt keeps one level deeper in a file of its own."""
    inner = quantization.get("quantization")
    return inner if isinstance(inner, dict) else quantization


# --- What their entries reach ---------------------------------------------------------------------


def _with_whole_linears(config: Mapping[str, Any], quantization: Config) -> Config:
    """Return native fp8's config with the names that are a linear's, or of experts, in the first of
    its lists that has any: vLLM compares whole names, or the ends of those, and reads no other
    list."""
    first = next((key for key in _FP8_LISTS if quantization.get(key)), None)
    if first is None:
        return quantization
    family = family_of(config)
    layers = [module.layer.prefix for module in family.mtp]
    linears, experts = _linears_and_experts(family, partial(family.vllm.name_of, layers))
    by_ends = family.vllm.fp8_ends and bool(quantization.get("weight_block_size"))

    def reached(name: str) -> list[str]:
        if by_ends:
            return [one for one in (*linears, *experts) if f".{one}".endswith(f".{name}")]
        is_of_experts = _EXPERTS in name and any(one in name for one in experts)
        return [name] if is_of_experts or name in linears else []

    kept = {
        key: [one for name in quantization[key] if key == first for one in reached(name)]
        for key in _FP8_LISTS
        if quantization.get(key)
    }
    return {**quantization, **kept}


def _with_heads_by_name(config: Mapping[str, Any], quantization: Config) -> Config:
    """Return compressed-tensors' config with the draft's heads in ignore that no target names: vLLM
    does not find one by the class Linear."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return quantization
    names = {
        key: {**group, "targets": [one for one in group.get("targets") or [] if one != "Linear"]}
        for key, group in groups.items()
    }
    by_name = quant_config_of({**quantization, "config_groups": names})
    heads = [head for layer in family_of(config).mtp if (head := layer.modules.head) is not None]
    more = [head for head in heads if by_name.format_of(head, Role.HEAD) is None]
    return {**quantization, "ignore": [*(quantization.get("ignore") or []), *more]}


def _with_ends_as_patterns(quantization: Config) -> Config:
    """Return AutoRound's config with names in extra_config that are the ends of longer ones as
    patterns, before the others."""
    changes = quantization.get("extra_config") or {}
    ends = {
        rf"\.{re.escape(name)}$": change
        for name, change in changes.items()
        if not _SPECIAL.search(name) and not name.startswith("model.")
    }
    return {**quantization, "extra_config": {**ends, **changes}} if ends else quantization


def _with_whole_patterns(quantization: Config) -> Config:
    """Return AutoRound's config with patterns in extra_config that match whole names alone."""
    changes = quantization.get("extra_config") or {}
    whole = {
        rf"^(?:{name})$" if _SPECIAL.search(name) else name: change
        for name, change in changes.items()
    }
    return {**quantization, "extra_config": whole} if whole else quantization


def _with_components(
    config: Mapping[str, Any], quantization: Config, tensors: Collection[str]
) -> Config:
    """Return bitsandbytes' config with entries that are no beginning of a name as one component of
    it, wherever that is: SGLang knows neither patterns nor ends. It asks for linears that it joins
    by the name of all of them, and for gates of attention and heads of an indexer never."""
    listed = quantization.get(SKIPPED)
    family = family_of(config, tensors)
    joined = {name: parts for parts, names in family.patterns.fused.items() for name in names}
    parts = {part for own in joined.values() for part in own}
    names = list[str]()
    for entry in map(str, listed if isinstance(listed, list) else ()):
        module, dot, last = entry.rpartition(".")
        if last not in parts:
            names += [f"{module}{dot}{one}" for one in (last, *joined.get(last, ()))]
    plain = (one for one in family.tensors.values() if one.role in _NEVER_ASKED)
    names += dict.fromkeys(
        one.module.rpartition(".")[2]
        for one in plain
        if one.name in tensors and _is_plain(one.name, tensors)
    )
    anywhere = [("" if "." in one else r"(?:.*\.)?") + re.escape(one) for one in names]
    return {**quantization, SKIPPED: anywhere}


def _with_reached_names(config: Mapping[str, Any], quantization: Config) -> Config:
    """Return ModelOpt's config with the entries that reach a module of SGLang's: a part of a name
    does where it is whole components of a linear's, and of experts the whole name alone."""
    family = family_of(config)
    layers = [module.layer.prefix for module in family.mtp]
    modules = _linears_and_experts(family, partial(family.sglang.name_of, layers))
    holder = _nested(quantization)
    changed = {
        key: [name for entry in holder[key] for name in _reached(str(entry), *modules)]
        for key in ("ignore", "exclude_modules")
        if isinstance(holder.get(key), list)
    }
    if holder is quantization:
        return {**quantization, **changed}
    return {**quantization, "quantization": {**holder, **changed}}


def _reached(entry: str, linears: Collection[str], experts: Collection[str]) -> list[str]:
    """Return an entry, or the linears that it reaches where experts are below it; nothing for one
    that reaches none."""
    if "*" in entry or "." not in entry or entry in experts:
        return [entry]
    below = [one for one in linears if f".{entry}." in f".{one}."]
    return below if any(entry in one for one in experts) else [entry] if below else []


def _linears_and_experts(
    family: ModelSpec, rename: Callable[[str], str]
) -> tuple[list[str], list[str]]:
    """Return the modules of the linears but for experts, and those of all experts of a layer, by
    the names that an engine has for them."""
    every = family.tensors.values()
    of_experts = (spec.name for spec in every if spec.role is Role.ROUTED_EXPERT)
    linears = (spec for spec in every if spec.is_linear_or_projection)
    return (
        [rename(one.module) for one in linears if one.role is not Role.ROUTED_EXPERT],
        list(
            dict.fromkeys(rename(f"{name.partition(EXPERTS)[0]}{_EXPERTS}") for name in of_experts)
        ),
    )
