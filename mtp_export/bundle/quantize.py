"""Quantize: plan a bundle with a pair of schemes, in the layout and with the config.json of the
engine that reads it. The source is a checkpoint or a bundle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers import SAFETENSORS
from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.single_experts import has_fused_codes, taken_fused
from mtp_checkpoints.formats import (
    FormatOptions,
    Fp8Block,
    Unquantized,
    W4AFp8,
    has_groups,
)
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, NATIVE_SCALE
from mtp_checkpoints.layouts import (
    engine_of,
    names_that_read,
    names_that_read_head,
    target_of,
)
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.method import VLLM, Dialect
from mtp_checkpoints.quantization.native import with_quantization
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import is_bundle
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_checkpoints.tensors.untied_head import with_untied_head
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.devices import device_of
from mtp_export.bundle.draft_apart import DraftApart
from mtp_export.bundle.export import Opened, open_source, plan_bundle, viewed
from mtp_export.bundle.gguf_parts import gguf_parts
from mtp_export.bundle.options import PlannerOptions
from mtp_export.bundle.precision import Format, Int4Scope, Int8Scope, Precision, check_format
from mtp_export.bundle.run_folder import check_output
from mtp_export.bundle.split import SplitOptions
from mtp_export.bundle.tensor_types import TensorTypes
from mtp_export.paths import refuse_overlaps
from mtp_export.schemes import HEAD_SCHEMES, SCHEMES
from mtp_export.schemes.configs import quantization_configs
from mtp_export.schemes.conversion import Conversion
from mtp_export.schemes.scheme import BF16, KEEP, Scheme
from mtp_export.schemes.table import GGUF_MTP, GGUF_SCHEMES, check_pair


@dataclass(frozen=True)
class QuantizeOptions(Precision, PlannerOptions):
    """A bundle, and the precision of each of its parts."""


@dataclass(frozen=True)
class _Choice:
    """Schemes of both parts for a given source, the format of their heads by name (None: as they
    are stored), and the way to describe integers to the engine."""

    base: Scheme
    mtp: Scheme
    head: str | None
    dialect: Dialect
    in_table: bool

    @property
    def storages(self) -> set[str]:
        heads = () if self.head is None else (self.head,)
        return {*self.base.storages.values(), *self.mtp.storages.values(), *heads}

    @property
    def has_groups(self) -> bool:
        return has_groups(self.storages)


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


def default_output(source: Place, precision: Precision, target: str) -> tuple[Path, Opened]:
    """Return a folder beside the input, named after the pair of schemes, and the input opened.

    Raises UsageError for a remote input, beside which nothing can be written.
    """
    if not isinstance(source, Path):
        raise UsageError(
            "A bundle cannot be written beside a remote input",
            where=source,
            expected="--output-dir",
            todo="Name the folder of the bundle",
        )
    opened = open_source(source, carried_to=target_of(target))
    names = _scheme_names(precision, opened[1])
    folder = source.resolve()
    return folder.with_name("-".join([folder.name, *names])), opened


def plan_quantize(
    options: QuantizeOptions, opened: Opened | None = None, *, dry_run: bool = False
) -> BundlePlan:
    """Check source, output and options, and plan the bundle (MtpExportError); opened: the source,
    where it is open already.

    Raises UnsupportedError for a pair outside the table, for a tensor that a scheme cannot hold
    (its K against the group size) and for a target that does not read the MTP module's scheme.
    """
    bundle = options.bundle
    refuse_overlaps({"--input-dir": bundle.input_dir}, {"--output-dir": bundle.output_dir})
    check_output(options.bundle.output_dir, options.bundle.run)
    plan = plan_bundle(options.bundle, *quantize_recipe(options, opened), dry_run=dry_run)
    TensorTypes.of(options.tensor_type or ()).check_found(plan.parts)
    return plan


def quantize_recipe(
    options: QuantizeOptions, opened: Opened | None = None
) -> tuple[Opened, Recipe]:
    """Check source and options; return the source, and the recipe of the bundle. Raises as
    plan_quantize."""
    target = target_of(options.bundle.target)
    source = checkpoint, stored = opened or open_source(options.bundle.input_dir, carried_to=target)
    choice = _choose(options, stored)
    check_format(options)
    _check_head(options, choice.head)
    if choice.head is not None:
        source = checkpoint, stored = viewed(with_untied_head(checkpoint, stored.family), source)
    _check_target(target, choice.mtp, stored)
    _check_storages(options.bundle.target, choice)
    main = _conversion(choice.base, choice, options, stored=stored)
    mtp = _conversion(choice.mtp, choice, options, stored=stored, of_mtp=True)
    _check_converts(options, main, stored)
    # Codes of fused experts are converted one by one, and no GGUF file has fused ones.
    of_main, of_mtp = (
        target.rewrites_main or Role.ROUTED_EXPERT in part.quantized_roles for part in (main, mtp)
    )
    of_main |= has_fused_codes(stored.family, mtp=False)
    of_mtp |= has_fused_codes(stored.family, main=False)
    _check_fused_experts(options.bundle.target, stored, main=main, mtp=mtp)
    apart = experts_apart(checkpoint, stored.family, main=of_main, mtp=of_mtp)
    source = checkpoint, stored = viewed(apart, source)
    draft = DraftApart.in_bundle(checkpoint, stored.family)
    configs = _configs(target, source, main, mtp if draft is None else main, choice.dialect)
    split = SplitOptions(
        target=target,
        shared_weights=options.bundle.content.shared_weights,
        max_shard_bytes=options.bundle.content.max_shard_bytes,
        main=main,
        mtp=mtp,
        main_config=configs[0],
        mtp_config=configs[1],
        gguf=gguf_parts(
            target,
            checkpoint,
            stored,
            options.bundle.content,
            TensorTypes.of(options.tensor_type or ()),
        ),
    )
    recipe = Recipe(split, _recorded(options, choice), device_of(options.device))
    return source, recipe if draft is None else _with_draft(recipe, draft, options, choice)


def _with_draft(
    recipe: Recipe, draft: DraftApart, options: QuantizeOptions, choice: _Choice
) -> Recipe:
    """Return the recipe of a bundle whose draft has a checkpoint and a config.json of its own."""
    alone = replace(choice, base=choice.mtp, head=None)
    own = _conversion(choice.mtp, alone, options, stored=draft.stored)
    return replace(recipe, draft=draft.part(recipe.split, own, choice.dialect))


def _configs(
    target: Target, source: Opened, main: Conversion, mtp: Conversion, dialect: Dialect
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json of both folders, without a quantization_config for a target whose
    files say themselves how they are stored."""
    checkpoint, stored = source
    if target.rewrites_main:
        plain = with_quantization(checkpoint.config, None)
        return plain, plain
    configs = quantization_configs(stored, main=main, mtp=mtp, dialect=dialect)
    config = {**checkpoint.config, **dict(stored.family.quantized_fields)}
    return with_quantization(config, configs.main), with_quantization(config, configs.mtp)


def _scheme_names(precision: Precision, stored: StoredModel) -> tuple[str, str]:
    """Return the names of both parts' schemes. Beside a main model in blocks of GGUF files a module
    that none is named for has that of the table."""
    base = _scheme_name(precision.base_quant, stored)
    if precision.mtp_quant == KEEP and base in GGUF_SCHEMES:
        return base, GGUF_MTP
    return base, _scheme_name(precision.mtp_quant, stored)


def _scheme_name(wanted: str, stored: StoredModel) -> str:
    """Return a scheme's name; "keep" is the scheme of the source.

    Raises UnsupportedError where the source's precision is no scheme's.
    """
    if wanted != KEEP:
        return wanted
    if stored.scheme is None:
        raise UnsupportedError(
            "This checkpoint is in a precision that no scheme writes, so a part cannot keep it",
            expected="--base-quant and --mtp-quant, both other than keep",
            found=f"{stored.unkept} linears",
            todo="Name both schemes",
        )
    return stored.scheme


def _choose(options: QuantizeOptions, stored: StoredModel) -> _Choice:
    base, mtp = _scheme_names(options, stored)
    in_table = check_pair(
        base,
        mtp,
        base_stays_bf16=base == BF16 and stored.scheme == BF16,
        allow_untested=options.allow_untested_pair,
        mtp_is_kept=options.mtp_quant == KEEP,
    )
    schemes = {"base": SCHEMES[base], "mtp": SCHEMES[mtp]}
    if options.int4_scope is not Int4Scope.EXPERTS:
        schemes["base"] = SCHEMES[base].variant("int4_scope", str(options.int4_scope))
    if options.int8_scope is not Int8Scope.MLPS:
        schemes["base"] = SCHEMES[base].variant("int8_scope", str(options.int8_scope))
    if options.format is not Format.COMPRESSED_TENSORS:
        schemes["base"] = SCHEMES[base].variant("format", str(options.format))
    # Without integers the dialects are alike.
    dialect = engine_of(options.bundle.target).dialect or VLLM
    head = HEAD_SCHEMES.get(options.head_quant)
    return _Choice(schemes["base"], schemes["mtp"], head, dialect, in_table)


def _check_converts(options: QuantizeOptions, main: Conversion, stored: StoredModel) -> None:
    """Refuse a scheme that quantizes no linear of the main model, such as int4 of experts for a
    model without any (UnsupportedError)."""
    roles = {kind.specs[0].role for kind in stored.main.kinds}
    if main.quantized_roles and main.quantized_roles.isdisjoint(roles):
        raise UnsupportedError(
            f"{options.base_quant} quantizes {' and '.join(sorted(main.quantized_roles))} linears"
            " alone, of which this model's main layers have none",
            where=options.bundle.input_dir,
            expected="--int4-scope all, or another --base-quant",
            found=f"--base-quant {options.base_quant} --int4-scope {options.int4_scope}",
        )


def _check_fused_experts(
    target: str, stored: StoredModel, *, main: Conversion, mtp: Conversion
) -> None:
    """Refuse to quantize a part with fused experts that the target takes as they are alone
    (UnsupportedError)."""
    fused = taken_fused(stored.family, target)
    for spec in map(stored.family.tensors.__getitem__, fused):
        part = main if spec.mtp_layer is None else mtp
        if Role.ROUTED_EXPERT in part.quantized_roles or has_fused_codes(stored.family):
            raise UnsupportedError(
                f"Target {target} reads this model's experts fused, and no codes of them",
                expected="bf16 for the part that holds them, or --target vllm",
                found=f"{spec.name} {list(spec.shape)}",
                todo="Keep that part in bf16, or add --target vllm, which loads single experts",
            )


def _check_head(options: QuantizeOptions, head: str | None) -> None:
    """Refuse a quantized head that no config of the format describes, or that the engine of
    --target does not read (UnsupportedError)."""
    if head is None:
        return
    found = f"--head-quant {options.head_quant}"
    if options.format is not Format.COMPRESSED_TENSORS:
        raise UnsupportedError(
            f"Format {options.format} has no field for a quantized head",
            expected="--head-quant keep, or --format compressed-tensors",
            found=found,
        )
    if head not in engine_of(options.bundle.target).quantized_heads:
        raise UnsupportedError(
            f"Target {options.bundle.target} is not known to read a head in {head}",
            expected=f"--target {' or '.join(names_that_read_head(head))}",
            found=f"{found} --target {options.bundle.target}",
            todo=f"Or use --head-quant keep for {options.bundle.target}",
        )


def _check_target(target: Target, mtp: Scheme, stored: StoredModel) -> None:
    """Refuse a draft that the target does not read, or that is converted and transposed at once."""
    native = stored.scheme
    readable = target.mtp_storages.issuperset(mtp.storages.values())
    if readable and (mtp.name == native or not target.transposes):
        return
    allowed = _schemes_in(target.mtp_storages)
    if target.transposes and native is not None:
        allowed = [native]
    raise UnsupportedError(
        f"Target {target.name} does not take the MTP module in {mtp.name}",
        expected=f"--mtp-quant {' or '.join(allowed)}",
        found=mtp.name,
        todo="Or use --target hf; its bundle may then be the input of an export for this target"
        if target.transposes
        else "Or use --target hf",
    )


def _schemes_in(storages: Collection[str]) -> list[str]:
    """Return the schemes whose linears are in these storages alone."""
    return sorted(
        name for name, scheme in SCHEMES.items() if set(scheme.storages.values()) <= set(storages)
    )


def _check_storages(target: str, choice: _Choice) -> None:
    """Refuse a bundle with a storage that the engine of --target does not read."""
    engine = engine_of(target)
    reads = engine.storages
    unread = sorted(choice.storages - reads)
    if not unread:
        return
    reasons = "".join(f": {engine.unread[one]}" for one in unread if one in engine.unread)
    schemes = f"--base-quant {' or '.join(_schemes_in(reads))}"
    w4afp8_alone = unread == [W4AFp8.storage] and has_groups(reads)
    raise UnsupportedError(
        f"Target {target} does not read a bundle with {' or '.join(unread)}{reasons}",
        expected=f"--target {' or '.join(names_that_read(choice.storages))}",
        found=f"{choice.base.name} + {choice.mtp.name}",
        todo=f"Or use {'--format compressed-tensors' if w4afp8_alone else schemes} for {target}",
    )


def _conversion(
    scheme: Scheme,
    choice: _Choice,
    options: QuantizeOptions,
    stored: StoredModel,
    *,
    of_mtp: bool = False,
) -> Conversion:
    """Return the conversion into a scheme, as the loader reads it.

    In some dialects fp8 beside integers is compressed-tensors too, with another scale name. There
    absorbed linears are in bf16, and where attention is packed, since engines read their weights
    themselves. Of MTP layers so are those that vLLM builds unquantized.
    """
    renamed = choice.has_groups and not choice.dialect.native_fp8
    heads = {} if choice.head is None else {Role.HEAD: choice.head}
    blocks_or_plain = (Fp8Block.storage, Unquantized.storage)
    # llama.cpp multiplies with blocks of what attention absorbs too.
    is_read_whole = scheme.container == SAFETENSORS.name
    packs_attention = is_read_whole and scheme.storages[Role.ATTENTION] not in blocks_or_plain
    return Conversion(
        scheme=scheme.name,
        storages={**scheme.with_tables, **heads},
        options=FormatOptions(
            group_size=options.group_size,
            fp8_scale_name=COMPRESSED_SCALE if renamed else NATIVE_SCALE,
        ),
        scale_rule=str(options.scale),
        bf16_modules=(
            *(stored.family.patterns.absorbed if renamed or packs_attention else ()),
            *(stored.family.vllm.plain_linears if of_mtp else ()),
        ),
        int4_activations_fp8=scheme.int4_activations_fp8,
        native=stored.native,
        joined=tuple(stored.family.patterns.fused),
    )


def _recorded(options: QuantizeOptions, choice: _Choice) -> dict[str, Any]:
    return {
        **options.bundle.recorded(),
        "base_quant": choice.base.name,
        "mtp_quant": choice.mtp.name,
        "pair_in_table": choice.in_table,
        "reader": choice.dialect.name,
        "format": str(options.format),
        "group_size": options.group_size,
        "int4_scope": str(options.int4_scope),
        "int8_scope": str(options.int8_scope),
        "head_quant": str(options.head_quant),
        "scale": str(options.scale),
        **({"tensor_type": options.tensor_type} if options.tensor_type else {}),
    }
