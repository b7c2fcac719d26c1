"""Linears that no list of a quantization_config names, and that loaders find to be unquantized by
their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import TensorSpec
from mtp_checkpoints.quantization.method import QuantConfig, modules_of
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of
from mtp_checkpoints.quantization.native import Config, quantization_of, with_quantization


def plain_linears(
    config: QuantConfig, specs: Iterable[TensorSpec], tensors: Collection[str]
) -> list[str]:
    """Return linears that are stored as they are though the config quantizes them."""
    stored = (spec for spec in specs if spec.is_linear_weight and spec.name in tensors)
    return modules_of(s for s in stored if config.format_of(s.module, s.role) is not None)


def with_absent_listed(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json as vLLM takes it for a folder with these tensors: where a quant_method
    lists no unquantized linear, those that have no codes are taken for listed.

    Source: vLLM's `maybe_update_config` of AWQ and GPTQ. Raises as family_of and quant_config_of.
    """
    quantization = quantization_of(config)
    method = METHODS.get(str(quantization.get("quant_method"))) if quantization else None
    if method is None or not method.absent_key or quantization.get(method.absent_key):
        return dict(config)
    assert method.leave_out is not None, "it lists modules under a key"
    specs = family_of(config).tensors.values()
    plain = plain_linears(quant_config_of(quantization), specs, tensors)
    return (
        with_quantization(config, method.leave_out(quantization, plain)) if plain else dict(config)
    )
