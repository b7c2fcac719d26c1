"""Writer of quantization_config: the storage of both parts' linears, as vLLM and SGLang read it.

A pattern is a regular expression matched from a module name's start. Patterns for the MTP layer
stay unescaped: SGLang replaces the literal `model.layers.61` in them by its draft's own name. In
configs of the families for which it does not, the layer stands under both names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import ModelFamily, Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.storage import INTEGERS, Storage
from mtp_checkpoints.quantization.dialects import SGLANG, VLLM, Dialect
from mtp_checkpoints.quantization.native import COMPRESSED, NATIVE_FP8, Config, with_left_out
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_export.schemes.conversion import Conversion

_LINEAR_FP8 = {key: value for key, value in NATIVE_FP8.items() if key != "fmt"}


@dataclass(frozen=True)
class PartConfigs:
    """quantization_config of each folder; None for a part without quantized linears."""

    main: Config | None
    mtp: Config | None


def quantization_configs(
    stored: StoredModel, main: Conversion, mtp: Conversion, dialect: Dialect
) -> PartConfigs:
    """Return the quantization_config of each folder.

    stored is what the source's config.json promises. vLLM reads the main folder's config for both
    parts and wants the same in the MTP folder; SGLang reads each folder's own. Raises
    UnsupportedError for a source that a config of the dialect cannot describe.
    """
    both = {*main.storages.values(), *mtp.storages.values()}
    if Storage.W4AFP8 in both:
        _check_nothing_left_out(stored, "--format w4afp8")
        own = _own_config(stored, mtp, SGLANG)
        return PartConfigs({"quant_method": "w4afp8"}, own)
    if not both.intersection(INTEGERS):
        config = _native_config(stored, main, mtp)
        return PartConfigs(config, config)
    if dialect.own_config and Storage.FP8_BLOCK in both:
        own = _own_config(stored, mtp, dialect)
        storages = set(main.storages.values())
        if Storage.FP8_BLOCK in storages and storages.intersection(INTEGERS):
            return PartConfigs(_compressed_config(stored, main, mtp, dialect), own)
        return PartConfigs(_own_config(stored, main, dialect), own)
    config = _compressed_config(stored, main, mtp, dialect)
    return PartConfigs(config, config)


def _own_config(stored: StoredModel, part: Conversion, dialect: Dialect) -> Config | None:
    """Return the config of a folder that is read on its own."""
    if set(part.storages.values()).intersection(INTEGERS):
        return _compressed_config(stored, part, part, dialect)
    return _native_config(stored, part, part)


def _check_nothing_left_out(stored: StoredModel, option: str) -> None:
    native = stored.native
    if native is not None and native.left_out:
        raise UnsupportedError(
            f"{option} cannot leave single linears in bf16, as this checkpoint does",
            expected="an fp8 checkpoint without modules_to_not_convert",
            found=", ".join(native.left_out[:3]),
            todo=f"Use --format compressed-tensors --target {VLLM.name}",
        )


def _native_config(stored: StoredModel, main: Conversion, mtp: Conversion) -> Config | None:
    """Return block fp8 as DeepSeek releases it; parts in bf16 are listed as left out."""
    if Storage.FP8_BLOCK not in {*main.storages.values(), *mtp.storages.values()}:
        return None
    quantization = NATIVE_FP8 if stored.native is None else stored.quantization
    assert isinstance(quantization, dict), "native fp8 was read from it"
    return with_left_out(quantization, _bf16_modules(stored.family, main, mtp))


def _bf16_modules(family: ModelFamily, main: Conversion, mtp: Conversion) -> list[str]:
    """Return the linears of a part in bf16 beside one in fp8; a layer's experts as one name."""
    names: dict[str, None] = {}
    for spec in family.tensors.values():
        part = main if spec.mtp_layer is None else mtp
        if part.storage_of(spec) is Storage.BF16:
            layer, experts, _ = spec.module.partition(".mlp.experts.")
            names |= dict.fromkeys(_names_of(family, layer + experts.rstrip("."), spec.mtp_layer))
    return list(names)


def _names_of(family: ModelFamily, module: str, mtp_layer: int | None) -> list[str]:
    """Return a module's name, and those of an MTP layer's module in engines."""
    own = f"model.layers.{mtp_layer}."
    names = () if mtp_layer is None else family.patterns.mtp_names
    return [module, *(module.replace(own, f"{name}.") for name in names)]


def _compressed_config(
    stored: StoredModel, main: Conversion, mtp: Conversion, dialect: Dialect
) -> Config:
    """Return a compressed-tensors config: one group per storage.

    One group holds the class Linear, for every linear that no pattern names: fp8, else int4, else
    int8. All loaders look at names before classes. SGLang looks at the class for int4 experts,
    beside which it must not fuse the shared expert into them; transformers takes the first group
    that names experts for them, and the one that does not for the dense MLP.
    """
    patterns = _patterns(stored.family, main, mtp)
    ignored = [*stored.family.patterns.other_matrices, *patterns.pop(Storage.BF16, [])]
    native_fp8 = dialect.native_fp8 and Storage.FP8_BLOCK in patterns
    if native_fp8:
        _check_nothing_left_out(stored, f"--target {dialect.name}")
        del patterns[Storage.FP8_BLOCK]
    elif Storage.FP8_BLOCK in patterns:
        ignored += [f"re:.*{name}$" for name in main.bf16_modules]
    if stored.native is not None:
        ignored += [f"re:(.*\\.)?{name}(\\..*)?$" for name in stored.native.left_out]
    order = [storage for storage in (*INTEGERS, Storage.FP8_BLOCK) if storage in patterns]
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
        "quant_method": COMPRESSED,
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
    """Return per storage the patterns of its linears; no module matches two.

    The MTP layer, as the engines build it, has no dense MLP.
    """
    layers = [f"model.layers.{layer}" for layer in family.mtp_layers]
    layers += family.patterns.mtp_names
    but_mtp = "|".join(f"{layer}." for layer in layers)
    result: dict[Storage, list[str]] = {}

    def add(storage: Storage, patterns: Iterable[str]) -> None:
        result.setdefault(storage, []).extend(patterns)

    for role, modules in family.patterns.linears.items():
        ours, theirs = main.storages[role], mtp.storages[role]
        if ours is theirs or role is Role.DENSE_MLP:
            add(ours, [f"re:.*{modules}"])
        else:
            add(ours, [f"re:(?!{but_mtp}).*{modules}"])
            add(theirs, [f"re:{layer}.{modules}" for layer in layers])
    return result


def _group(storage: Storage, targets: list[str], main: Conversion, mtp: Conversion) -> Config:
    part = next(part for part in (main, mtp) if storage in part.storages.values())
    described = FORMATS[storage](part.options).group(activations_fp8=part.int4_activations_fp8)
    return {"targets": targets, **described}
