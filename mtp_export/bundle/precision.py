"""Options of a quantization: the precision of each part, and the device that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mtp_checkpoints.formats.base import GROUP_SIZES
from mtp_export.options import Panel, option
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import KEEP


class Format(StrEnum):
    """Layout of a8w8_fp8_wint4 on disk."""

    COMPRESSED_TENSORS = "compressed-tensors"
    W4AFP8 = "w4afp8"


class Int4Scope(StrEnum):
    """Linears that weight_only_int4 packs."""

    EXPERTS = "experts"
    ALL = "all"


class ScaleRule(StrEnum):
    """Choice of the scale of an int4 group."""

    MINMAX = "minmax"
    MSE = "mse"


class Device(StrEnum):
    """Device that computes; the results are equal bit by bit."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    AUTO = "auto"


_NAMES = (*SCHEMES, KEEP)
# Every pair of the table gives the MTP module 8 bits or more.
_MTP_NAMES = tuple(name for name in _NAMES if "int4" not in name)


@dataclass(frozen=True)
class Precision:
    """Schemes by name ("keep": that of the source), and their variants."""

    base_quant: str = field(
        default=KEEP,
        metadata=option(
            f"Precision of the main model: {', '.join(_NAMES)}.",
            Panel.PRECISION,
            metavar="SCHEME",
            choices=_NAMES,
        ),
    )
    mtp_quant: str = field(
        default=KEEP,
        metadata=option(
            f"Precision of the MTP module: {', '.join(_MTP_NAMES)}.",
            Panel.PRECISION,
            metavar="SCHEME",
            choices=_MTP_NAMES,
        ),
    )
    format: Format = field(
        default=Format.COMPRESSED_TENSORS,
        metadata=option(
            "Layout of a8w8_fp8_wint4: compressed-tensors or w4afp8.",
            Panel.PRECISION,
            metavar="NAME",
        ),
    )
    group_size: int = field(
        default=128,
        metadata=option(
            "Weights per int4 scale: 32, 64 or 128.",
            Panel.PRECISION,
            metavar="N",
            parser=int,
            choices=tuple(map(str, GROUP_SIZES)),
            default="128",
        ),
    )
    int4_scope: Int4Scope = field(
        default=Int4Scope.EXPERTS,
        metadata=option(
            "Linears that weight_only_int4 packs: experts or all.", Panel.PRECISION, metavar="SCOPE"
        ),
    )
    scale: ScaleRule = field(
        default=ScaleRule.MINMAX,
        metadata=option("Choice of an int4 scale: minmax or mse.", Panel.PRECISION, metavar="RULE"),
    )
    device: Device = field(
        default=Device.CPU,
        metadata=option(
            "Device that computes: cpu, cuda, npu or auto.", Panel.PERFORMANCE, metavar="NAME"
        ),
    )
    allow_untested_pair: bool = field(
        default=False,
        metadata=option(
            "Accept a pair of schemes that is not in the precision table.", Panel.PRECISION
        ),
    )
