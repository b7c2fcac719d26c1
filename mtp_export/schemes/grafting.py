"""Configs of a main model that others quantized and of MTP layers grafted onto it, by which engines
build both as they are stored. vLLM reads the main folder's for both, SGLang each folder's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import ModelFamily, TensorSpec
from mtp_checkpoints.formats import FormatOptions
from mtp_checkpoints.formats.storage import COMPRESSED_SCALE, NATIVE_SCALE, Storage
from mtp_checkpoints.layouts import engine_of, target_names
from mtp_checkpoints.quantization.dialects import Dialect
from mtp_checkpoints.quantization.methods.awq import AWQ, left_out_of_awq
from mtp_checkpoints.quantization.methods.compressed import left_out_of_compressed
from mtp_checkpoints.quantization.methods.gptq import GPTQ, left_out_of_gptq
from mtp_checkpoints.quantization.methods.modelopt import MODELOPT, left_out_of_modelopt
from mtp_checkpoints.quantization.native import COMPRESSED, Config, with_left_out
from mtp_checkpoints.quantization.readings import Reading, reading_of
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_export.schemes.base import Scheme
from mtp_export.schemes.configs import quantization_configs
from mtp_export.schemes.conversion import Conversion
from mtp_export.schemes.draft_groups import with_draft_groups

_FP8 = "fp8"
_LOOKS_AT_TENSORS = (AWQ, GPTQ)


def _left_out_of_fp8(quantization: Config, modules: Sequence[str]) -> Config:
    return with_left_out(quantization, list(modules))


# By quant_method: the config that leaves modules unquantized, with all below them.
LEFT_OUT: dict[str, Callable[[Config, Sequence[str]], Config]] = {
    _FP8: _left_out_of_fp8,
    COMPRESSED: left_out_of_compressed,
    AWQ: left_out_of_awq,
    GPTQ: left_out_of_gptq,
    MODELOPT: left_out_of_modelopt,
}
# By quant_method: storages of a quantized draft that a main model's config can describe. AWQ knows
# one format; GPTQ's `dynamic` and ModelOpt's mixed precision only formats that no scheme writes.
DESCRIBED: dict[str | None, frozenset[Storage]] = {
    _FP8: frozenset({Storage.FP8_BLOCK}),
    COMPRESSED: frozenset({Storage.INT8_CHANNEL, Storage.FP8_BLOCK}),
}


@dataclass(frozen=True)
class Draft:
    """A draft to be described beside a main model: the checkpoint that it comes from, the scheme
    that it is stored in, and the dialect of the engine that loads it."""

    stored: StoredModel
    scheme: Scheme
    dialect: Dialect

    @property
    def family(self) -> ModelFamily:
        return self.stored.family

    @property
    def storages(self) -> frozenset[Storage]:
        """Storages of its quantized linears."""
        return frozenset(self.scheme.storages.values()) - {Storage.BF16}

    def fits(self, method: str | None) -> bool:
        """Return whether a main model's config of a quant_method can describe it."""
        known = DESCRIBED.get(method, frozenset())
        if method == COMPRESSED and self.dialect.native_fp8:
            known -= {Storage.FP8_BLOCK}
        return self.storages <= known

    def conversion(self, *, in_group: bool) -> Conversion:
        """Return its conversion; in_group: a compressed-tensors config describes it, with another
        name for fp8 scales, and linears that attention absorbs stay in bf16."""
        return Conversion(
            scheme=self.scheme.name,
            storages=self.scheme.storages,
            options=FormatOptions(fp8_scale_name=COMPRESSED_SCALE if in_group else NATIVE_SCALE),
            bf16_modules=self.family.patterns.absorbed if in_group else (),
            native=self.stored.native,
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
    method = _method_of(quantization)
    fits = draft.fits(method)
    if not fits and not draft.dialect.own_config:
        raise _undescribed(method, draft)
    together = fits and bool(draft.storages)
    mtp = draft.conversion(in_group=together and method == COMPRESSED)
    main = None
    if isinstance(quantization, dict) and method is not None:
        main = _main_config(quantization, tensors, draft, mtp if together else None)
    own = main
    if not fits:
        own = quantization_configs(draft.stored, main=mtp, mtp=mtp, dialect=draft.dialect).mtp
    _check_described(method, reading_of(own), draft.family, mtp)
    in_one_dialect = together and method == COMPRESSED and Storage.FP8_BLOCK in draft.storages
    return GraftDescription(
        main=main,
        mtp=own if draft.storages else None,
        conversion=mtp,
        reader=draft.dialect.name if in_one_dialect or not fits else None,
    )


def _main_config(
    quantization: Config,
    tensors: Mapping[str, object],
    draft: Draft,
    together: Conversion | None,
) -> Config:
    """Return the main folder's config, which describes the draft by this conversion, or else leaves
    it out.

    AWQ's and GPTQ's loaders find linears that are not quantized by their tensors, but only as long
    as nothing is listed: those of the main model are listed too, therefore.
    """
    method, family = quantization["quant_method"], draft.family
    if together is not None and method == COMPRESSED:
        return with_draft_groups(quantization, family, together)
    listed: list[str] = []
    if method in _LOOKS_AT_TENSORS:
        listed += _plain_linears(reading_of(quantization), family, tensors)
    listed += _draft_modules(method, family, together)
    return LEFT_OUT[method](quantization, listed) if listed else dict(quantization)


def _method_of(quantization: object) -> str | None:
    """Return a quant_method, None without (what reading_of raises, and UnsupportedError for one
    that leaves nothing out)."""
    reading_of(quantization)
    if not quantization:
        return None
    assert isinstance(quantization, dict), "reading_of refuses anything else"
    method = str(quantization["quant_method"])
    if method not in LEFT_OUT:
        raise UnsupportedError(
            "A draft cannot be described beside a main model of this quantization method",
            expected=f"quant_method {' or '.join(LEFT_OUT)}",
            found=method,
        )
    return method


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


def _plain_linears(
    reading: Reading, family: ModelFamily, tensors: Mapping[str, object]
) -> list[str]:
    """Return main linears that are stored as they are though the config quantizes them."""
    main = (spec for spec in _linears(family) if spec.mtp_layer is None and spec.name in tensors)
    return _modules(s for s in main if reading.format_of(s.module, s.role) is not None)


def _draft_modules(method: str, family: ModelFamily, partly: Conversion | None) -> list[str]:
    """Return the draft's modules that are not quantized: the MTP layers, or linears one by one
    where loaders compare whole names. partly is the conversion of a draft that has others."""
    if method != _FP8:
        return [f"model.layers.{layer}" for layer in family.mtp_layers]
    mtp = (spec for spec in _linears(family) if spec.mtp_layer is not None)
    return _modules(s for s in mtp if partly is None or partly.storage_of(s) is None)


def _modules(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the modules of linears; a layer's experts as one name."""
    parts = (spec.module.partition(".mlp.experts.") for spec in specs)
    return list(dict.fromkeys(layer + experts.rstrip(".") for layer, experts, _ in parts))


def _linears(family: ModelFamily) -> list[TensorSpec]:
    return [spec for spec in family.tensors.values() if spec.is_linear_weight]


def _check_described(
    method: str | None, reading: Reading, family: ModelFamily, mtp: Conversion
) -> None:
    """Refuse a draft that engines would take for something else by this config."""
    for spec in family.tensors.values():
        if spec.mtp_layer is None or len(spec.shape) != 2:
            continue
        found = reading.format_of(spec.module, spec.role)
        read_as = Storage.BF16 if found is None else found.storage
        stored_as = mtp.storage_of(spec) or Storage.BF16
        if read_as is not stored_as:
            raise UnsupportedError(
                f"The main model's quantization_config describes {spec.module} in another"
                " precision than the draft would have",
                expected=f"{stored_as}, by --mtp-quant {mtp.scheme}",
                found=f"{read_as}, by quant_method {method}",
                todo="Use --mtp-quant bf16, which every method can leave unquantized",
            )
