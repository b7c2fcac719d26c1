"""Configs of a main model that others quantized and of MTP layers grafted onto it, by which engines
build both as they are stored. vLLM reads the main folder's for both, SGLang each folder's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import FormatOptions, Fp8Block, Unquantized
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, NATIVE_SCALE
from mtp_checkpoints.layouts import engine_of, target_names
from mtp_checkpoints.quantization.absent import plain_linears, uncoded
from mtp_checkpoints.quantization.method import Dialect, Method, QuantConfig, modules_of
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of
from mtp_checkpoints.quantization.native import Config, field_of, method_of
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.quantization.undecoded import Undecoded
from mtp_export.schemes.configs import quantization_configs
from mtp_export.schemes.conversion import Conversion
from mtp_export.schemes.scheme import Scheme

# Of weights that are no linears: those that some methods have in codes too.
_APART = (Role.ROUTED_EXPERT, Role.INDEXER_HEADS)


@dataclass(frozen=True)
class Draft:
    """A draft to be described beside a main model: the checkpoint that it comes from, the scheme
    that it is stored in, and the dialect of the engine that loads it."""

    stored: StoredModel
    scheme: Scheme
    dialect: Dialect

    @property
    def family(self) -> ModelSpec:
        return self.stored.family

    @property
    def storages(self) -> frozenset[str]:
        """Storages of its quantized linears."""
        return frozenset(self.scheme.storages.values()) - {Unquantized.storage}

    def fits(self, method: str | None) -> bool:
        """Return whether a main model's config of a quant_method can describe it."""
        known = METHODS[method].draft_storages(self.dialect) if method else frozenset()
        return self.storages <= known

    def conversion(self, *, in_groups: bool) -> Conversion:
        """Return its conversion; in_groups: a compressed-tensors config describes it, with another
        name for fp8 scales, and linears that attention absorbs stay in bf16."""
        return Conversion(
            scheme=self.scheme.name,
            storages=self.scheme.with_tables,
            options=FormatOptions(fp8_scale_name=COMPRESSED_SCALE if in_groups else NATIVE_SCALE),
            bf16_modules=(
                *(self.family.patterns.absorbed if in_groups else ()),
                *self.family.vllm.plain_linears,
            ),
            native=self.stored.native,
            joined=tuple(self.family.patterns.fused),
        )


@dataclass(frozen=True)
class GraftDescription:
    """quantization_config of each folder, None for an unquantized part; the draft's conversion; and
    the name of the dialect that alone describes the draft so, None where all do."""

    main: Config | None
    mtp: Config | None
    conversion: Conversion
    reader: str | None


def describe_graft(
    quantization: object, tensors: Mapping[str, object], draft: Draft
) -> GraftDescription:
    """Describe a main model, which has this quantization_config and these tensors, and a draft.

    The main folder's config describes both where it can. Else the draft's own describes the draft,
    for an engine that reads it.

    Raises UnsupportedError for a draft that cannot be described, and what reading_of raises.
    """
    name = _method_of(quantization)
    fits = draft.fits(name)
    if not fits and not draft.dialect.own_config:
        raise _undescribed(name, draft)
    together = fits and bool(draft.storages)
    in_groups = together and name is not None and METHODS[name].in_groups
    mtp = draft.conversion(in_groups=in_groups)
    main = None
    if isinstance(quantization, dict) and name is not None:
        main = _main_config(METHODS[name], quantization, tensors, draft, mtp if together else None)
    mtp_config = main
    if not fits:
        own_configs = quantization_configs(draft.stored, main=mtp, mtp=mtp, dialect=draft.dialect)
        mtp_config = own_configs.mtp
    _check_described(quantization, quant_config_of(mtp_config), draft.family, mtp)
    in_one_dialect = in_groups and Fp8Block.storage in draft.storages
    return GraftDescription(
        main=main,
        mtp=mtp_config if draft.storages else None,
        conversion=mtp,
        reader=draft.dialect.name if in_one_dialect or not fits else None,
    )


def describe_beside_undecoded(
    known: Undecoded, quantization: Config, draft: Draft
) -> GraftDescription:
    """Describe a draft beside a main model whose numbers are not decoded: its config leaves the
    draft out, whose own describes it, for an engine that reads it (UnsupportedError for others)."""
    mtp = draft.conversion(in_groups=False)
    main = _left_out(METHODS[known.name], quantization, draft.family)
    if not draft.storages:
        return GraftDescription(main=main, mtp=None, conversion=mtp, reader=None)
    if not draft.dialect.own_config:
        raise _undescribed(known.name, draft)
    own = quantization_configs(draft.stored, main=mtp, mtp=mtp, dialect=draft.dialect).mtp
    _check_described(quantization, quant_config_of(own), draft.family, mtp)
    return GraftDescription(main=main, mtp=own, conversion=mtp, reader=draft.dialect.name)


def _main_config(
    method: Method,
    quantization: Config,
    tensors: Collection[str],
    draft: Draft,
    together: Conversion | None,
) -> Config:
    """Return the main folder's config, which describes the draft by this conversion, or else leaves
    it out.

    Where loaders look for tensors as long as nothing is listed, the main model's linears that are
    not quantized are listed too.
    """
    family = draft.family
    if together is not None:
        assert method.describe is not None, "the draft fits"
        return method.describe(quantization, family, together)
    listed: list[str] = []
    if method.absent_key:
        main = [spec for spec in _linears(family) if spec.mtp_layer is None]
        listed += plain_linears(quant_config_of(quantization), main, tensors)
    if method.coded_by:
        every = (spec for spec in family.tensors.values() if spec.mtp_layer is None)
        listed += uncoded(quantization, every, tensors)
    return _left_out(method, quantization, family, listed)


def _left_out(
    method: Method, quantization: Config, family: ModelSpec, listed: Sequence[str] = ()
) -> Config:
    """Return a config that leaves out the MTP modules of a family, by the names of their tensors
    and by vLLM's, behind modules that are listed."""
    assert method.leave_out is not None, "_method_of refuses others"
    own = [(one.name, one.layer.prefix, one.modules.projection) for one in family.mtp]
    names = [name for names in own for name in names if name]
    if method.whole_names:
        names = _linears_of_modules(quantization, family)
    layers = [module.layer.prefix for module in family.mtp]
    names += [family.vllm.name_of(layers, name) for name in names]
    names += [family.vllm.projection] if family.vllm.projection else []
    return method.leave_out(quantization, [*listed, *_not_below_others(names)])


def _linears_of_modules(quantization: Config, family: ModelSpec) -> list[str]:
    """Return the linears of the MTP modules by their names, and what else engines have in codes."""
    own = [spec for spec in family.tensors.values() if spec.mtp_layer is not None]
    apart = [spec for spec in own if spec.role in _APART]
    try:
        known = quant_config_of(quantization)
    except UnsupportedError:  # of numbers that are not read
        known = None
    if known is not None:
        apart = [spec for spec in apart if known.format_of(spec.module, spec.role) is not None]
    return modules_of([*(spec for spec in own if spec.is_linear_or_projection), *apart])


def _not_below_others(names: Sequence[str]) -> list[str]:
    """Return names, each once, without those of modules in others of them."""
    return [
        name
        for name in dict.fromkeys(names)
        if not any(name.startswith(f"{other}.") for other in names)
    ]


def _method_of(quantization: object) -> str | None:
    """Return a quant_method, None without (what quant_config_of raises, and UnsupportedError for
    one that leaves nothing out)."""
    quant_config_of(quantization)
    if not quantization:
        return None
    assert isinstance(quantization, dict), "quant_config_of refuses anything else"
    name = method_of(quantization)
    if METHODS[name].leave_out is None:
        others = (other for other, method in METHODS.items() if method.leave_out)
        raise UnsupportedError(
            "A draft cannot be described beside a main model of this quantization method",
            expected=f"quant_method {' or '.join(others)}",
            found=name,
        )
    return name


def _undescribed(method: str | None, draft: Draft) -> UnsupportedError:
    readers = [
        f"--target {engine.name}: {engine.title} reads the draft's own config.json"
        for engine in map(engine_of, target_names())
        if engine.title and engine.dialect is not None and engine.dialect.own_config
    ]
    main = "an unquantized main model" if method is None else f"quant_method {method}"
    return UnsupportedError(
        "This draft cannot be described in the main folder's config.json, by which"
        f" {draft.dialect.title} builds both parts: it has no field for"
        f" {' and '.join(sorted(draft.storages))} linears beside {main}",
        expected="--mtp-quant bf16, which goes with every main model",
        found=f"--mtp-quant {draft.scheme.name}",
        todo=f"Or use {', or '.join(readers)}",
    )


def _linears(family: ModelSpec) -> list[TensorSpec]:
    return [spec for spec in family.tensors.values() if spec.is_linear_weight]


def _check_described(
    of_main: object, config: QuantConfig, family: ModelSpec, mtp: Conversion
) -> None:
    """Refuse a draft that engines would take for something else by this config, which a main
    model's made."""
    for spec in family.mtp_tensors.values():
        if len(spec.shape) != 2:
            continue
        actual = config.format_of(spec.module, spec.role)
        read_as = Unquantized.storage if actual is None else actual.storage
        stored_as = mtp.storage_of(spec) or Unquantized.storage
        if read_as != stored_as:
            raise UnsupportedError(
                f"The main model's {field_of(of_main)} describes {spec.module} in another"
                " precision than the draft would have",
                expected=f"{stored_as}, by --mtp-quant {mtp.scheme}",
                found=f"{read_as}, by quant_method {method_of(of_main) or None}",
                todo="Use --mtp-quant bf16, which every method can leave unquantized",
            )
