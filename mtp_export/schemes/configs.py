"""quantization_config: how vLLM and SGLang are told what the linears of both parts are.

A pattern is a regular expression matched from a module name's start. Patterns for the MTP layer
stay unescaped: SGLang replaces the literal `model.layers.61` in them by its draft's own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mtp_export.errors import UnsupportedError
from mtp_export.families.base import ModelFamily, Role
from mtp_export.schemes.base import Conversion
from mtp_export.schemes.storage import BLOCK, Storage

Config = dict[str, Any]

NATIVE_FP8: Config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
_LINEAR_FP8 = {key: value for key, value in NATIVE_FP8.items() if key != "fmt"}
_INTEGERS = (Storage.INT4_GROUP, Storage.INT8_CHANNEL)
# Never quantized, whatever the scheme; engines would otherwise take some for linears.
_NEVER = ["lm_head", "re:.*mlp.gate$", "re:.*eh_proj$", "re:.*shared_head.*", "re:.*embed_tokens$"]
# The modules of a role behind a layer's prefix, fused ones included.
_MODULES = {
    Role.ATTENTION: "self_attn.*_proj.*",
    Role.DENSE_MLP: "mlp.(gate_proj|up_proj|gate_up_proj|down_proj)$",
    Role.SHARED_EXPERT: "mlp.shared_experts.*",
    Role.ROUTED_EXPERT: "mlp.experts.*",
}


class Reader(StrEnum):
    """Whose loader a layout is for, where the two differ."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True)
class PartConfigs:
    """The quantization_config of each folder; None for a part without quantized linears."""

    main: Config | None
    mtp: Config | None


def quantization_configs(
    source: Mapping[str, Any],
    family: ModelFamily,
    main: Conversion,
    mtp: Conversion,
    reader: Reader,
) -> PartConfigs:
    """What each folder's config.json says. vLLM reads the main folder's for both parts and wants
    the same in the MTP folder; SGLang reads each folder's own.

    source is the source's config.json.
    """
    both = {*main.storages.values(), *mtp.storages.values()}
    if Storage.W4AFP8 in both:
        _check_nothing_left_out(family, "--format w4afp8")
        own = _own_config(source, family, mtp, Reader.SGLANG)
        return PartConfigs({"quant_method": "w4afp8"}, own)
    if not both.intersection(_INTEGERS):
        config = _native_config(source, family, main, mtp)
        return PartConfigs(config, config)
    if reader is Reader.SGLANG and Storage.FP8_BLOCK in both:
        own = _own_config(source, family, mtp, reader)
        forms = set(main.storages.values())
        if Storage.FP8_BLOCK in forms and forms.intersection(_INTEGERS):
            return PartConfigs(_compressed_config(family, main, mtp, reader), own)
        return PartConfigs(_own_config(source, family, main, reader), own)
    config = _compressed_config(family, main, mtp, reader)
    return PartConfigs(config, config)


def _own_config(
    source: Mapping[str, Any], family: ModelFamily, part: Conversion, reader: Reader
) -> Config | None:
    """The config of a folder that is read on its own."""
    if set(part.storages.values()).intersection(_INTEGERS):
        return _compressed_config(family, part, part, reader)
    return _native_config(source, family, part, part)


def _check_nothing_left_out(family: ModelFamily, option: str) -> None:
    fp8 = family.quantization
    if fp8 is not None and fp8.unconverted:
        raise UnsupportedError(
            f"{option} cannot leave single linears in bf16, as this checkpoint does",
            expected="an fp8 checkpoint without modules_to_not_convert",
            found=", ".join(fp8.unconverted[:3]),
            todo="Use --format compressed-tensors --target vllm",
        )


def _native_config(
    source: Mapping[str, Any], family: ModelFamily, main: Conversion, mtp: Conversion
) -> Config | None:
    """Block fp8 as DeepSeek releases it; the parts in bf16 are listed as left out."""
    if Storage.FP8_BLOCK not in {*main.storages.values(), *mtp.storages.values()}:
        return None
    config = dict(source.get("quantization_config") or NATIVE_FP8)
    left_out = _bf16_modules(family, main, mtp)
    if left_out:
        for key in ("modules_to_not_convert", "ignored_layers"):
            config[key] = [*(config.get(key) or []), *left_out]
    return config


def _bf16_modules(family: ModelFamily, main: Conversion, mtp: Conversion) -> list[str]:
    """Linears of a part that is in bf16 beside one in fp8; a layer's experts as one name."""
    names: dict[str, None] = {}
    for spec in family.expected.values():
        part = main if spec.mtp_layer is None else mtp
        if part.storage_of(spec) is Storage.BF16:
            layer, experts, _ = spec.module.partition(".mlp.experts.")
            names[layer + experts.rstrip(".")] = None
    return list(names)


def _compressed_config(
    family: ModelFamily, main: Conversion, mtp: Conversion, reader: Reader
) -> Config:
    """compressed-tensors: one group a form. One of them stands for every linear that no pattern
    names, as names go before classes in all loaders: fp8, else int4, else int8. SGLang looks at the
    class for int4 experts, beside which it must not fuse the shared expert into them; transformers
    takes the first group that names experts for them, and the one that does not for the dense."""
    patterns = _patterns(family, main, mtp)
    ignored = [*_NEVER, *patterns.pop(Storage.BF16, [])]
    native_fp8 = reader is Reader.SGLANG and Storage.FP8_BLOCK in patterns
    if native_fp8:
        _check_nothing_left_out(family, "--target sglang")
        del patterns[Storage.FP8_BLOCK]
    elif Storage.FP8_BLOCK in patterns:
        ignored += [f"re:.*{name}$" for name in main.bf16_modules]
    if family.quantization is not None:
        ignored += [f"re:(.*\\.)?{name}(\\..*)?$" for name in family.quantization.unconverted]
    order = [storage for storage in (*_INTEGERS, Storage.FP8_BLOCK) if storage in patterns]
    for_the_rest = Storage.FP8_BLOCK if Storage.FP8_BLOCK in order else order[0]
    if for_the_rest is Storage.FP8_BLOCK or len(order) == 1:
        patterns[for_the_rest] = []
    patterns[for_the_rest].insert(0, "Linear")
    groups = {
        f"group_{number}": _group(storage, patterns[storage], main, mtp)
        for number, storage in enumerate(order)
    }
    formats = {group["format"] for group in groups.values()}
    config: Config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(formats) > 1 else "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": groups,
    }
    if native_fp8:
        config["linear_fp8_config"] = _LINEAR_FP8
    return config


def _patterns(family: ModelFamily, main: Conversion, mtp: Conversion) -> dict[Storage, list[str]]:
    """Per form the patterns of its linears; no module matches two. The MTP layer, as the engines
    build it, has no dense MLP."""
    layers = [f"model.layers.{layer}" for layer in family.mtp_layers]
    but_mtp = "|".join(f"{layer}." for layer in layers)
    result: dict[Storage, list[str]] = {}

    def add(storage: Storage, patterns: Iterable[str]) -> None:
        result.setdefault(storage, []).extend(patterns)

    for role, modules in _MODULES.items():
        ours, theirs = main.storages[role], mtp.storages[role]
        if ours is theirs or role is Role.DENSE_MLP:
            add(ours, [f"re:.*{modules}"])
        else:
            add(ours, [f"re:(?!{but_mtp}).*{modules}"])
            add(theirs, [f"re:{layer}.{modules}" for layer in layers])
    return result


def _group(storage: Storage, targets: list[str], main: Conversion, mtp: Conversion) -> Config:
    has_int4 = [part for part in (main, mtp) if Storage.INT4_GROUP in part.storages.values()]
    activations: Config | None = None
    if storage is Storage.FP8_BLOCK:
        weights = _weights(8, "float", "block") | {"block_structure": [BLOCK, BLOCK]}
        activations = _activations("group") | {"group_size": BLOCK}
    elif storage is Storage.INT8_CHANNEL:
        weights = _weights(8, "int", "channel") | {"group_size": None, "actorder": None}
    else:
        size = has_int4[0].group_size
        weights = _weights(4, "int", "group") | {"group_size": size, "actorder": None}
        activations = _activations("token") if has_int4[0].int4_activations_fp8 else None
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": "float-quantized" if storage is Storage.FP8_BLOCK else "pack-quantized",
    }


def _weights(bits: int, kind: str, strategy: str) -> Config:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }


def _activations(strategy: str) -> Config:
    """fp8 activations, scaled as they come."""
    return _weights(8, "float", strategy) | {"dynamic": True}
