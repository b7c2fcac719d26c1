"""Linears that no list of a quantization_config names, and that engines take for unquantized
nevertheless."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import FLOATS, Role, TensorSpec, weight_name
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.method import (
    Method,
    QuantConfig,
    modules_of,
    projections_of,
)
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of
from mtp_checkpoints.quantization.mismatches import HasLayout
from mtp_checkpoints.quantization.native import (
    Config,
    method_of,
    quantization_of,
    with_quantization,
)


def as_engines_take(
    config: Mapping[str, Any], tensors: Collection[str], *, experts: bool = False
) -> Config:
    """Return a config.json as a loader that looks at a folder's tensors takes it. experts is that
    of with_absent_listed. Raises as family_of and quant_config_of."""
    listed = with_absent_listed(config, tensors, experts=experts)
    return with_projection_listed(_with_uncoded_listed(listed, tensors), tensors)


def with_absent_listed(
    config: Mapping[str, Any], tensors: Collection[str], *, experts: bool = False
) -> Config:
    """Return a config.json as vLLM takes it for a folder with these tensors: where a quant_method
    lists no unquantized linear, those that have no codes are taken for listed, projections of MTP
    modules too, which some of its drafts ask for. vLLM builds routed experts quantized unless they
    are listed; with experts, those are taken so too.

    Source: vLLM's `maybe_update_config` of AWQ and GPTQ. Raises as family_of and quant_config_of.
    """
    quantization = quantization_of(config)
    if not isinstance(quantization, dict) or not quantization:
        return dict(config)
    method = METHODS.get(method_of(quantization))
    if method is None or not method.absent_key or quantization.get(method.absent_key):
        return dict(config)
    family = family_of(config, tensors)
    specs = [
        spec for spec in family.tensors.values() if experts or spec.role is not Role.ROUTED_EXPERT
    ]
    plain = plain_linears(quant_config_of(quantization), specs, tensors)
    return _listed(config, [*plain, *_plain_projections(family, method, tensors)])


def _with_uncoded_listed(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json in which all is listed that its method's loaders find unquantized by the
    tensors alone."""
    quantization = quantization_of(config)
    method = METHODS.get(method_of(quantization))
    if method is None or not method.coded_by or not _is_understood(quantization):
        return dict(config)
    every = family_of(config, tensors).tensors.values()
    return _listed(config, uncoded(quantization, every, tensors))


def _is_understood(quantization: Mapping[str, Any]) -> bool:
    try:
        quant_config_of(quantization)
    except UnsupportedError:
        return False
    return True


def with_projection_listed(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json in which the projections of MTP modules are listed where these tensors
    hold them unquantized: engines build them so whatever it says.

    Source: `eh_proj` of vLLM's and SGLang's models is a linear of torch. Raises as family_of and
    quant_config_of.
    """
    quantization = quantization_of(config)
    if not quantization:
        return dict(config)
    known, method = quant_config_of(quantization), METHODS[method_of(quantization)]
    if method.packs_projections:
        return dict(config)
    plain = _plain_projections(family_of(config), method, tensors)
    return _listed(config, [m for m in plain if known.format_of(m, Role.MTP_PROJECTION)])


def _plain_projections(family: ModelSpec, method: Method, tensors: Collection[str]) -> list[str]:
    """Return the projections of MTP modules that are stored without codes."""
    stored = [one for one in projections_of(family) if weight_name(one) in tensors]
    return [m for m in stored if not any(f"{m}.{one}" in tensors for one in method.coded_by)]


def with_plain_projections_listed(
    config: Mapping[str, Any], tensors: Mapping[str, HasLayout]
) -> Config:
    """Return a config.json in which the projections of MTP modules are listed that these tensors
    hold unquantized, by the names that engines have: where it would have them quantized itself, or
    as any linear, as which some engines build them. Raises as family_of and quant_config_of."""
    quantization = quantization_of(config)
    if not quantization:
        return dict(config)
    known, family = quant_config_of(quantization), family_of(config, tensors)
    roles = [Role.MTP_PROJECTION]
    if any(draft.projection is not None for draft in (family.vllm, family.sglang)):
        roles.append(Role.ATTENTION)
    listed = list[str]()
    for layer, mtp in zip(family.mtp_layers, family.mtp, strict=True):
        module = mtp.modules.projection
        tensor = tensors.get(weight_name(module)) if module else None
        if not module or tensor is None or tensor.dtype not in FLOATS:
            continue
        if any(known.format_of(module, role) is not None for role in roles):
            listed += family.names_of(module, layer)
    return _listed(config, listed)


def plain_linears(
    config: QuantConfig, specs: Iterable[TensorSpec], tensors: Collection[str]
) -> list[str]:
    """Return linears that are stored as they are though the config quantizes them."""
    stored = (spec for spec in specs if spec.is_linear_weight and spec.name in tensors)
    return modules_of(s for s in stored if config.format_of(s.module, s.role) is not None)


def uncoded(
    quantization: Mapping[str, Any], specs: Iterable[TensorSpec], tensors: Collection[str]
) -> list[str]:
    """Return matrices that a config quantizes and that are stored without what its method tells
    quantized ones by: of experts, which engines read alike, those of layers where none has it."""
    known, ends = quant_config_of(quantization), METHODS[method_of(quantization)].coded_by
    matrices = [spec for spec in specs if len(spec.shape) == 2 and spec.name in tensors]
    coded = {
        spec.module for spec in matrices if any(f"{spec.module}.{end}" in tensors for end in ends)
    }
    experts = {layer for layer, mark, _ in (m.partition(EXPERTS) for m in coded) if mark}
    return modules_of(
        spec
        for spec in matrices
        if spec.module not in coded
        and (EXPERTS not in spec.module or spec.module.partition(EXPERTS)[0] not in experts)
        and known.format_of(spec.module, spec.role) is not None
    )


def _listed(config: Mapping[str, Any], modules: Sequence[str]) -> Config:
    """Return a config.json that leaves modules out too, if its method can."""
    quantization = quantization_of(config)
    leave_out = METHODS[method_of(quantization)].leave_out
    if not modules or leave_out is None:
        return dict(config)
    return with_quantization(config, leave_out(quantization, modules))
