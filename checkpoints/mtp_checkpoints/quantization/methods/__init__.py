"""Quantization methods by quant_method, one file each. Names follow vLLM's and SGLang's resolvers.

Names and config alone decide a linear's format, never which tensors exist, so that contradictions
can be found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, GGUF, WeightFormat
from mtp_checkpoints.quantization.method import Dialect, Method, QuantConfig, Unfused
from mtp_checkpoints.quantization.methods.auto_round import AUTO_ROUND
from mtp_checkpoints.quantization.methods.awq import AWQ
from mtp_checkpoints.quantization.methods.bitsandbytes import BITSANDBYTES
from mtp_checkpoints.quantization.methods.compressed import COMPRESSED_TENSORS
from mtp_checkpoints.quantization.methods.fp8 import FP8, W4AFP8
from mtp_checkpoints.quantization.methods.gguf import GGUF_TYPES
from mtp_checkpoints.quantization.methods.gptq import GPTQ
from mtp_checkpoints.quantization.methods.mlx import MLX
from mtp_checkpoints.quantization.methods.modelopt import MODELOPT
from mtp_checkpoints.quantization.methods.quark import QUARK
from mtp_checkpoints.quantization.native import method_of, not_an_object, quantization_of
from mtp_checkpoints.quantization.undecoded import MLX_METHOD, UNDECODED, Undecoded

METHODS: dict[str, Method] = {
    "fp8": FP8,
    "compressed-tensors": COMPRESSED_TENSORS,
    "w4afp8": W4AFP8,
    "awq": AWQ,
    "gptq": GPTQ,
    "modelopt": MODELOPT,
    "auto-round": AUTO_ROUND,
    "quark": QUARK,
    "bitsandbytes": BITSANDBYTES,
    MLX_METHOD: MLX,
    GGUF: GGUF_TYPES,
}


def quant_config_of(quantization: object) -> QuantConfig:
    """Read a quantization_config; None, {} and "" (as xLLM has it) mean no quantization.

    Raises UnsupportedError for a method or layout that this tool does not know, InvalidInputError
    for one that makes no sense.
    """
    if not quantization:
        return _Unquantized()
    if not isinstance(quantization, dict):
        raise not_an_object(quantization)
    method = method_of(quantization)
    if method not in METHODS:
        raise UnsupportedError(
            "config.json names a quantization method that this tool does not read",
            expected=f"quant_method {' or '.join(METHODS)}",
            found=repr(quantization.get("quant_method"))[:100],
        )
    return METHODS[method].read(quantization)


def undecoded_of(config: Mapping[str, Any]) -> Undecoded | None:
    """Return the quantization of a config.json whose numbers are not decoded here; None for one
    that is decoded, not known, or damaged."""
    quantization = quantization_of(config)
    known = UNDECODED.get(method_of(quantization))
    if known is None or (known.models and str(config.get("model_type")) not in known.models):
        return known
    try:
        quant_config_of(quantization)
    except UnsupportedError:
        return known
    except MtpExportError:  # a field of it is unusable: its reader says which
        return None
    return None


def check_decoded(config: Mapping[str, Any]) -> None:
    """Refuse a config.json with numbers that are not decoded here (UnsupportedError)."""
    if (known := undecoded_of(config)) is not None:
        quant_config_of(quantization_of(config))  # whose refusal names them, unless it is the model
        raise known.refusal(f"model_type {config.get('model_type')}")


def method_writing(storages: Collection[str]) -> Method:
    """Return the method whose config describes linears in these storages."""
    described = [FORMATS[storage].methods for storage in storages if FORMATS[storage].methods]
    return next(
        method
        for name, method in METHODS.items()
        if method.write and all(name in methods for methods in described)
    )


def dialect_of(storages: Collection[str]) -> Dialect | None:
    """Return the dialect that storages bring with them: that of the method of one of them."""
    named = (METHODS[name] for storage in storages for name in FORMATS[storage].methods[:1])
    return next((method.dialect for method in named if method.dialect is not None), None)


class _Unquantized(Unfused):
    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        return None
