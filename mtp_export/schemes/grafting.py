"""quantization_config of a main model that another quantized, extended so that engines build the
MTP layers grafted onto it as they are stored. vLLM reads it for both; SGLang reads the draft's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mtp_export.errors import UnsupportedError
from mtp_export.families.base import ModelFamily, TensorSpec
from mtp_export.schemes.conversion import Conversion
from mtp_export.schemes.methods.awq import AWQ, left_out_of_awq
from mtp_export.schemes.methods.gptq import GPTQ, left_out_of_gptq
from mtp_export.schemes.methods.modelopt import MODELOPT, left_out_of_modelopt
from mtp_export.schemes.native import COMPRESSED, Config, with_left_out
from mtp_export.schemes.readings import Reading, reading_of
from mtp_export.schemes.storage import Storage

_FP8 = "fp8"
_LOOKS_AT_TENSORS = (AWQ, GPTQ)


def _left_out_of_compressed(quantization: Config, modules: Sequence[str]) -> Config:
    """Patterns stay unescaped: SGLang replaces a literal layer in them."""
    ours = [rf"re:{module}(\..*)?$" for module in modules]
    return {**quantization, "ignore": [*(quantization.get("ignore") or []), *ours]}


def _left_out_of_fp8(quantization: Config, modules: Sequence[str]) -> Config:
    return with_left_out(quantization, list(modules))


# By quant_method: the config that leaves modules unquantized, with all below them.
LEFT_OUT: dict[str, Callable[[Config, Sequence[str]], Config]] = {
    _FP8: _left_out_of_fp8,
    COMPRESSED: _left_out_of_compressed,
    AWQ: left_out_of_awq,
    GPTQ: left_out_of_gptq,
    MODELOPT: left_out_of_modelopt,
}


def grafted_quantization(
    quantization: object, family: ModelFamily, tensors: Mapping[str, object], mtp: Conversion
) -> Config | None:
    """Return the main folder's quantization_config; None for an unquantized main model.

    family has the MTP layers; tensors are the main model's by name; mtp converts the draft. AWQ's
    and GPTQ's loaders find linears that are not quantized by their tensors as long as nothing is
    listed: those are listed too.

    Raises UnsupportedError for a method that cannot describe the draft, and what reading_of raises.
    """
    reading = reading_of(quantization)
    if not quantization:
        _check_unquantized(mtp)
        return None
    assert isinstance(quantization, dict), "reading_of refuses anything else"
    method = quantization["quant_method"]
    if method not in LEFT_OUT:
        raise UnsupportedError(
            "A draft cannot be described beside a main model of this quantization method",
            expected=f"quant_method {' or '.join(LEFT_OUT)}",
            found=method,
        )
    modules = _plain_linears(reading, family, tensors) if method in _LOOKS_AT_TENSORS else []
    if not _quantizes(mtp):
        modules += _draft_modules(method, family)
    extended = LEFT_OUT[method](quantization, modules) if modules else dict(quantization)
    _check_described(method, reading_of(extended), family, mtp)
    return extended


def _check_unquantized(mtp: Conversion) -> None:
    if _quantizes(mtp):
        raise UnsupportedError(
            "The main model is not quantized, and its config.json cannot describe a quantized"
            " draft alone",
            expected="--mtp-quant bf16",
            found=f"--mtp-quant {mtp.scheme}",
            todo="mtp-export quantize makes a bundle whose parts differ",
        )


def _quantizes(mtp: Conversion) -> bool:
    return set(mtp.storages.values()) != {Storage.BF16}


def _plain_linears(
    reading: Reading, family: ModelFamily, tensors: Mapping[str, object]
) -> list[str]:
    """Return main linears that are stored as they are though the config quantizes them."""
    main = (spec for spec in _linears(family) if spec.mtp_layer is None and spec.name in tensors)
    return _modules(s for s in main if reading.format_of(s.module, s.role) is not None)


def _draft_modules(method: str, family: ModelFamily) -> list[str]:
    """Return the MTP layers, or their linears one by one where loaders compare whole names."""
    if method != _FP8:
        return [f"model.layers.{layer}" for layer in family.mtp_layers]
    return _modules(spec for spec in _linears(family) if spec.mtp_layer is not None)


def _modules(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the modules of linears; a layer's experts as one name."""
    names: dict[str, None] = {}
    for spec in specs:
        layer, experts, _ = spec.module.partition(".mlp.experts.")
        names[layer + experts.rstrip(".")] = None
    return list(names)


def _linears(family: ModelFamily) -> list[TensorSpec]:
    return [spec for spec in family.tensors.values() if spec.is_linear_weight]


def _check_described(method: str, reading: Reading, family: ModelFamily, mtp: Conversion) -> None:
    """Refuse a draft that engines would take for something else by this config."""
    for spec in _linears(family):
        if spec.mtp_layer is None:
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
