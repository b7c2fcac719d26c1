"""Quantize: plan a bundle with a pair of schemes, in the layout and with the config.json of the
engine that reads it. The source is a checkpoint or a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_export.bundle.build import BundlePlan, Recipe, open_source, plan_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.preflight import check_nesting, check_output
from mtp_export.bundle.split import SplitOptions
from mtp_export.checkpoint.bundle_folder import is_bundle
from mtp_export.checkpoint.manifest import MANIFEST_NAME
from mtp_export.errors import UnsupportedError, UsageError
from mtp_export.families.base import ModelFamily
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.base import Conversion, Scheme
from mtp_export.schemes.configs import Reader, quantization_configs
from mtp_export.schemes.storage import (
    COMPRESSED_SCALE,
    GROUP_SIZES,
    NATIVE_SCALE,
    W4AFP8_GROUP,
    Storage,
)
from mtp_export.schemes.table import check_pair
from mtp_export.schemes.transforms import Numerics
from mtp_export.targets import integer_options, target_of
from mtp_export.targets.base import Target

KEEP = "keep"


class Format(StrEnum):
    """Layout of a8w8_fp8_wint4 on disk."""

    COMPRESSED_TENSORS = "compressed-tensors"
    W4AFP8 = "w4afp8"


class Int4Scope(StrEnum):
    """Linears that weight_only_int4 packs."""

    EXPERTS = "experts"
    ALL = "all"


class ScaleRule(StrEnum):
    """Choice of the scale of an int4 group."""

    MINMAX = "minmax"
    MSE = "mse"


class Device(StrEnum):
    """Device that computes; the results are equal bit by bit."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


@dataclass(frozen=True)
class QuantizeOptions:
    """Schemes by name ("keep": that of the source), and their variants."""

    bundle: BundleOptions
    base_quant: str = KEEP
    mtp_quant: str = KEEP
    format: Format = Format.COMPRESSED_TENSORS
    group_size: int = 128
    int4_scope: Int4Scope = Int4Scope.EXPERTS
    scale: ScaleRule = ScaleRule.MINMAX
    device: Device = Device.CPU
    allow_untested_pair: bool = False


@dataclass(frozen=True)
class _Choice:
    """Schemes of both parts for a given source, and the engine whose loader reads the result."""

    base: Scheme
    mtp: Scheme
    reader: Reader
    in_table: bool

    @property
    def storages(self) -> set[Storage]:
        return {*self.base.storages.values(), *self.mtp.storages.values()}

    @property
    def has_integers(self) -> bool:
        return bool(self.storages & {Storage.INT4_GROUP, Storage.INT8_CHANNEL})


def default_input() -> Path:
    """Return the current folder (UsageError if it is no bundle)."""
    folder = Path.cwd()
    if not is_bundle(folder) or not (folder / MANIFEST_NAME).is_file():
        raise UsageError(
            "The current folder is not a bundle",
            where=folder,
            expected=f"main/, mtp/ and {MANIFEST_NAME}, or --input-dir",
            todo="See mtp-export quantize --help",
        )
    return folder


def default_output(source: Path, base_quant: str, mtp_quant: str) -> Path:
    """Return a folder beside the input, named after the pair of schemes."""
    _, family = open_source(source)
    names = [_scheme_name(name, family) for name in (base_quant, mtp_quant)]
    folder = source.resolve()
    return folder.with_name("-".join([folder.name, *names]))


def plan_quantize(options: QuantizeOptions, *, dry_run: bool = False) -> BundlePlan:
    """Check source, output and options, and plan the bundle (MtpExportError).

    Raises UnsupportedError for a pair outside the table, for a tensor that a scheme cannot hold
    (its K against the group size) and for a target that does not read the MTP module's scheme.
    """
    target = target_of(options.bundle.target)
    check_nesting(options.bundle.input_dir, options.bundle.output_dir)
    check_output(options.bundle.output_dir, options.bundle.run.overwrite)
    source = checkpoint, family = open_source(options.bundle.input_dir)
    choice = _choose(options, family)
    _check_format(options, choice)
    _check_target(target, choice.mtp, family)
    _check_integers(options.bundle.target, choice)
    main = _conversion(choice.base, choice, options, family)
    mtp = _conversion(choice.mtp, choice, options, family)
    configs = quantization_configs(checkpoint.config, family, main, mtp, choice.reader)
    split = SplitOptions(
        target=target,
        shared_weights=options.bundle.content.shared_weights,
        max_shard_bytes=options.bundle.content.max_shard_bytes,
        main=main,
        mtp=mtp,
        main_config=_with_quantization(checkpoint.config, configs.main),
        mtp_config=_with_quantization(checkpoint.config, configs.mtp),
    )
    numerics = Numerics(str(options.scale), _device(options.device))
    recipe = Recipe(split, _recorded(options, choice), numerics)
    return plan_bundle(options.bundle, source, recipe, dry_run=dry_run)


def _scheme_name(wanted: str, family: ModelFamily) -> str:
    """Return a scheme's name; "keep" is the scheme of the source."""
    if wanted != KEEP:
        return wanted
    return "bf16" if family.quantization is None else "a8w8_fp8"


def _choose(options: QuantizeOptions, family: ModelFamily) -> _Choice:
    base, mtp = (_scheme_name(name, family) for name in (options.base_quant, options.mtp_quant))
    left_in_bf16 = base == "bf16" and family.quantization is None
    in_table = check_pair(
        base, mtp, base_left_in_bf16=left_in_bf16, allow_untested=options.allow_untested_pair
    )
    schemes = {"base": SCHEMES[base], "mtp": SCHEMES[mtp]}
    if options.int4_scope is Int4Scope.ALL:
        schemes["base"] = SCHEMES[base].variant("--int4-scope", str(options.int4_scope))
    if options.format is Format.W4AFP8:
        schemes["base"] = SCHEMES[base].variant("--format", str(options.format))
    reader = Reader.SGLANG if options.bundle.target == "sglang" else Reader.VLLM
    return _Choice(schemes["base"], schemes["mtp"], reader, in_table)


def _check_format(options: QuantizeOptions, choice: _Choice) -> None:
    if options.group_size not in GROUP_SIZES:
        raise UsageError(
            "This group size is not one that engines have kernels for",
            expected=f"--group-size {', '.join(map(str, GROUP_SIZES))}",
            found=options.group_size,
        )
    if options.format is not Format.W4AFP8:
        return
    if options.group_size != W4AFP8_GROUP:
        raise UsageError(
            "Format w4afp8 has one group size",
            expected=f"--group-size {W4AFP8_GROUP}",
            found=options.group_size,
        )
    if options.bundle.target == "vllm":
        raise UnsupportedError(
            "vLLM does not read format w4afp8",
            expected="--target sglang",
            todo="Or use --format compressed-tensors",
        )


def _check_target(target: Target, mtp: Scheme, family: ModelFamily) -> None:
    """What a target cannot read as its draft, or this tool does not convert and transpose."""
    unchanged = mtp.name == _scheme_name(KEEP, family)
    readable = target.mtp_schemes is None or mtp.name in target.mtp_schemes
    if readable and (unchanged or not target.transposes):
        return
    allowed = (
        [_scheme_name(KEEP, family)] if target.transposes else sorted(target.mtp_schemes or ())
    )
    raise UnsupportedError(
        f"Target {target.name} does not take the MTP module in {mtp.name}",
        expected=f"--mtp-quant {' or '.join(allowed)}",
        found=mtp.name,
        todo="Or use --target hf; its bundle may then be the input of an export for this target"
        if target.transposes
        else "Or use --target hf",
    )


def _check_integers(target: str, choice: _Choice) -> None:
    """Integers are compressed-tensors' or SGLang's own: no other engine's folders hold them."""
    readers = integer_options()
    if choice.storages <= {Storage.BF16, Storage.FP8_BLOCK} or target in readers:
        return
    raise UnsupportedError(
        f"Target {target} does not read a bundle with integers",
        expected=f"--target {' or '.join(readers)}",
        found=f"{choice.base.name} + {choice.mtp.name}",
        todo=f"Or use --base-quant a8w8_fp8 or bf16 for {target}",
    )


def _conversion(
    scheme: Scheme, choice: _Choice, options: QuantizeOptions, family: ModelFamily
) -> Conversion:
    """A scheme in the layout of its reader. To vLLM, fp8 beside integers is compressed-tensors too:
    with another scale name, and kv_b_proj in bf16."""
    renamed = choice.reader is Reader.VLLM and choice.has_integers
    return Conversion(
        scheme=scheme.name,
        storages=scheme.storages,
        group_size=options.group_size,
        fp8_scale_name=COMPRESSED_SCALE if renamed else NATIVE_SCALE,
        bf16_modules=("kv_b_proj",) if renamed else (),
        int4_activations_fp8=scheme.int4_activations_fp8,
        source=family.quantization,
    )


def _with_quantization(config: Mapping[str, Any], quantization: Any) -> dict[str, Any]:
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    return rest if quantization is None else {**rest, "quantization_config": quantization}


def _device(wanted: Device) -> str:
    if wanted is Device.CPU:
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted is Device.CUDA:
        raise UnsupportedError(
            "There is no CUDA device here", expected="--device cpu or auto", found="--device cuda"
        )
    return "cpu"


def _recorded(options: QuantizeOptions, choice: _Choice) -> dict[str, Any]:
    return {
        **options.bundle.recorded(),
        "base_quant": choice.base.name,
        "mtp_quant": choice.mtp.name,
        "pair_in_table": choice.in_table,
        "reader": str(choice.reader),
        "format": str(options.format),
        "group_size": options.group_size,
        "int4_scope": str(options.int4_scope),
        "scale": str(options.scale),
    }
