"""Quantization methods by quant_method, one file each. Names follow vLLM's and SGLang's resolvers.

Names and config alone decide a linear's format, never which tensors exist, so that contradictions
can be found.
"""

from __future__ import annotations

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.formats.storage import Storage
from mtp_checkpoints.quantization.method import Method, QuantConfig, Unfused
from mtp_checkpoints.quantization.methods.awq import AWQ
from mtp_checkpoints.quantization.methods.compressed import COMPRESSED_TENSORS
from mtp_checkpoints.quantization.methods.fp8 import FP8, W4AFP8
from mtp_checkpoints.quantization.methods.gptq import GPTQ
from mtp_checkpoints.quantization.methods.modelopt import MODELOPT
from mtp_checkpoints.quantization.native import not_an_object

METHODS: dict[str, Method] = {
    "fp8": FP8,
    "compressed-tensors": COMPRESSED_TENSORS,
    "w4afp8": W4AFP8,
    "awq": AWQ,
    "gptq": GPTQ,
    "modelopt": MODELOPT,
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
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            "config.json names a quantization method that this tool does not read",
            expected=f"quant_method {' or '.join(METHODS)}",
            found=repr(method)[:100],
        )
    return METHODS[method].read(quantization)


def method_writing(storages: frozenset[Storage]) -> Method:
    """Return the method whose config describes linears in these storages."""
    known = storages - {Storage.BF16}
    return next(method for method in METHODS.values() if method.write and known <= method.writes)


class _Unquantized(Unfused):
    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        return None
