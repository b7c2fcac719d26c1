"""Options of a quantization: the precision of each part, and the device that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.formats.base import GROUP_SIZES
from mtp_checkpoints.formats.w4afp8 import W4AFP8_GROUP
from mtp_export.options import Names, Panel, option
from mtp_export.schemes.scheme import KEEP


class Format(StrEnum):
    """Layout on disk of a8w8_fp8_wint4 and nvfp4."""

    COMPRESSED_TENSORS = "compressed-tensors"
    W4AFP8 = "w4afp8"
    MODELOPT = "modelopt"


class Int4Scope(StrEnum):
    """Linears that weight_only_int4 packs."""

    EXPERTS = "experts"
    ALL = "all"
    LINEARS = "linears"


class Int8Scope(StrEnum):
    """Linears that weight_only_int8 packs."""

    MLPS = "mlps"
    LINEARS = "linears"


class HeadQuant(StrEnum):
    """Precision of the language-model head."""

    KEEP = "keep"
    WEIGHT_ONLY_INT8 = "weight_only_int8"


class ScaleRule(StrEnum):
    """Choice of the scale of a group, of int4 or nvfp4."""

    MINMAX = "minmax"
    MSE = "mse"


class Device(StrEnum):
    """Device that computes; the results are equal bit by bit."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    AUTO = "auto"


@dataclass(frozen=True)
class Precision:
    """Schemes by name ("keep": that of the source), and their variants."""

    base_quant: str = field(
        default=KEEP,
        metadata=option(
            "Precision of the main model: {names}.",
            Panel.PRECISION,
            metavar="SCHEME",
            values=Names.SCHEME,
        ),
    )
    mtp_quant: str = field(
        default=KEEP,
        metadata=option(
            "Precision of the MTP module: {names}.",
            Panel.PRECISION,
            metavar="SCHEME",
            values=Names.MTP_SCHEME,
        ),
    )
    format: Format = field(
        default=Format.COMPRESSED_TENSORS,
        metadata=option(
            "Layout of a8w8_fp8_wint4 (w4afp8) and nvfp4 (modelopt): {names}.",
            Panel.PRECISION,
            metavar="NAME",
        ),
    )
    group_size: int = field(
        default=128,
        metadata=option(
            "Weights per int4 scale: {names}.",
            Panel.PRECISION,
            metavar="N",
            parser=int,
            values=Names.GROUP_SIZE,
            default="128",
        ),
    )
    int4_scope: Int4Scope = field(
        default=Int4Scope.EXPERTS,
        metadata=option(
            "Linears that weight_only_int4 packs: {names}.", Panel.PRECISION, metavar="SCOPE"
        ),
    )
    int8_scope: Int8Scope = field(
        default=Int8Scope.MLPS,
        metadata=option(
            "Linears that weight_only_int8 packs: {names}.", Panel.PRECISION, metavar="SCOPE"
        ),
    )
    head_quant: HeadQuant = field(
        default=HeadQuant.KEEP,
        metadata=option(
            "Precision of the language-model head and of its copy in the MTP layer: {names}.",
            Panel.PRECISION,
            metavar="SCHEME",
        ),
    )
    scale: ScaleRule = field(
        default=ScaleRule.MINMAX,
        metadata=option(
            "Choice of the scale of a group: {names}.", Panel.PRECISION, metavar="RULE"
        ),
    )
    tensor_type: list[str] | None = field(
        default=None,
        metadata=option(
            "Type of tensors of GGUF files in whose names a pattern is found, as llama-quantize"
            " takes it; repeatable, the first that is found counts.",
            Panel.PRECISION,
            metavar="PATTERN=TYPE",
        ),
    )
    device: Device = field(
        default=Device.CPU,
        metadata=option("Device that computes: {names}.", Panel.PERFORMANCE, metavar="NAME"),
    )
    allow_untested_pair: bool = field(
        default=False,
        metadata=option(
            "Accept a pair of schemes that is not in the precision table.", Panel.PRECISION
        ),
    )


def check_format(options: Precision) -> None:
    """Refuse a group size that no engine has kernels for, or that a format does not have
    (UsageError)."""
    if options.group_size not in GROUP_SIZES:
        raise UsageError(
            "This group size is not one that engines have kernels for",
            expected=f"--group-size {', '.join(map(str, GROUP_SIZES))}",
            found=options.group_size,
        )
    if options.format is not Format.W4AFP8:
        return
    if options.group_size != W4AFP8_GROUP:
        raise UsageError(
            "Format w4afp8 has one group size",
            expected=f"--group-size {W4AFP8_GROUP}",
            found=options.group_size,
        )
