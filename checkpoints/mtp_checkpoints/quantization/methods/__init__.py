"""Quantization methods by quant_method, one file each. Names follow vLLM's and SGLang's resolvers.

Names and config alone decide a linear's format, never which tensors exist, so that contradictions
can be found.
"""

from __future__ import annotations

from collections.abc import Collection

from mtp_checkpoints.containers.base import QUANTIZATION
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, GGUF, WeightFormat
from mtp_checkpoints.quantization.method import Dialect, Method, QuantConfig, Unfused
from mtp_checkpoints.quantization.methods.auto_round import AUTO_ROUND
from mtp_checkpoints.quantization.methods.awq import AWQ
from mtp_checkpoints.quantization.methods.compressed import COMPRESSED_TENSORS
from mtp_checkpoints.quantization.methods.fp8 import FP8, W4AFP8
from mtp_checkpoints.quantization.methods.gguf import GGUF_TYPES
from mtp_checkpoints.quantization.methods.gptq import GPTQ
from mtp_checkpoints.quantization.methods.modelopt import MODELOPT
from mtp_checkpoints.quantization.native import not_an_object
from mtp_checkpoints.quantization.undecoded import undecoded_of

METHODS: dict[str, Method] = {
    "fp8": FP8,
    "compressed-tensors": COMPRESSED_TENSORS,
    "w4afp8": W4AFP8,
    "awq": AWQ,
    "gptq": GPTQ,
    "modelopt": MODELOPT,
    "auto-round": AUTO_ROUND,
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
    if (known := undecoded_of({QUANTIZATION: quantization})) is not None:
        raise known.refusal()
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            "config.json names a quantization method that this tool does not read",
            expected=f"quant_method {' or '.join(METHODS)}",
            found=repr(method)[:100],
        )
    return METHODS[method].read(quantization)


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
