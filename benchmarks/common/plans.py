"""Conversions of the MTP part that several benchmarks measure."""

from __future__ import annotations

from pathlib import Path

from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.bundle.quantize import QuantizeOptions
from mtp_export.schemes.table import GGUF_SCHEMES

SCHEMES = {
    "int8": "weight_only_int8",
    "int4": "weight_only_int4",
    "nvfp4": "weight_only_nvfp4",
    "a4w4": "a4w4_nvfp4",
    "mxfp4": "weight_only_mxfp4",
    "mxfp8": "a8w8_mxfp8",
    **{name: name for name in ("q8_0", "q4_0", "q6_k", "q4_k")},
}


def options(source: Path, output: Path, scheme: str, group_size: int) -> QuantizeOptions:
    """The MTP part in a scheme; in blocks of GGUF files it has no vocabulary."""
    is_gguf = scheme in GGUF_SCHEMES
    content = ContentOptions(part=Part.MTP, pre_tokenizer="none" if is_gguf else None)
    target = "llama.cpp" if is_gguf else "vllm"
    bundle = BundleOptions(source, output, target=target, content=content)
    return QuantizeOptions(
        bundle,
        base_quant=scheme,
        mtp_quant=scheme,
        group_size=group_size,
        allow_untested_pair=True,
    )
