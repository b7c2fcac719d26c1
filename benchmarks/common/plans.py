"""Conversions of the MTP part that several benchmarks measure."""

from __future__ import annotations

from pathlib import Path

from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.bundle.quantize import QuantizeOptions

SCHEMES = {"int8": "weight_only_int8", "int4": "weight_only_int4"}


def options(source: Path, output: Path, scheme: str, group_size: int) -> QuantizeOptions:
    """The MTP part in a scheme."""
    bundle = BundleOptions(source, output, content=ContentOptions(part=Part.MTP))
    return QuantizeOptions(
        bundle,
        base_quant=scheme,
        mtp_quant=scheme,
        group_size=group_size,
        allow_untested_pair=True,
    )
