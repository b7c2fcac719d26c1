"""Supported pairs of base and MTP precision, their sizes, and the refusal of any other pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from mtp_checkpoints.dtypes import tensor_bytes
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import FORMATS, GGUF, FormatOptions
from mtp_checkpoints.layouts import titles_that_read
from mtp_export.schemes import SCHEMES


@dataclass(frozen=True)
class Pair:
    """Schemes of the base and the MTP module, and on how many GPUs they are served."""

    base: str
    mtp: str
    deployment: str

    @property
    def engines(self) -> tuple[str, ...]:
        """Titles of the engines whose loaders read both, from their sources."""
        main, mtp = (frozenset(SCHEMES[s].storages.values()) for s in (self.base, self.mtp))
        return titles_that_read(main, mtp)


GGUF_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.container == GGUF)
GGUF_MTP = "q8_0"  # of a module beside any of them
# No pair was run on a GPU.
PAIRS = (
    Pair("a8w8_fp8_wint4", "a8w8_fp8", "TP8"),
    Pair("weight_only_int4", "weight_only_int8", "TP8"),
    Pair("a8w8_fp8", "a8w8_fp8", "TP16 (2×TP8)"),
    Pair("weight_only_int8", "weight_only_int8", "TP16 (2×TP8)"),
    Pair("weight_only_nvfp4", "weight_only_nvfp4", "TP8"),
    Pair("weight_only_nvfp4", "a8w8_fp8", "TP8"),
    Pair("weight_only_nvfp4", "bf16", "TP8"),
    Pair("a4w4_nvfp4", "a4w4_nvfp4", "TP8"),
    Pair("a4w4_nvfp4", "a8w8_fp8", "TP8"),
    Pair("a4w4_nvfp4", "bf16", "TP8"),
    Pair("weight_only_mxfp4", "weight_only_mxfp4", "TP8"),
    Pair("a8w8_mxfp8", "a8w8_mxfp8", "TP16 (2×TP8)"),
    Pair("bf16", "bf16", "-"),
    *(Pair(name, GGUF_MTP, "-") for name in GGUF_SCHEMES),
)


@dataclass(frozen=True)
class Weight:
    """Size of a part: its parameters (without scales) and bytes (with scales)."""

    parameters: int
    size_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size_bytes / self.parameters


def check_pair(
    base: str, mtp: str, *, base_stays_bf16: bool, allow_untested: bool, mtp_is_kept: bool = False
) -> bool:
    """Return True for a pair of the table, False for one that is allowed all the same.

    A base that stays in bf16 goes with any MTP module; mtp_is_kept: its scheme is the source's, and
    was not named. Raises UnsupportedError with the schemes that the base goes with for any other
    pair.
    """
    if any((pair.base, pair.mtp) == (base, mtp) for pair in PAIRS):
        return True
    if not (allow_untested or base_stays_bf16):
        found = f"keep (the source's {mtp})" if mtp_is_kept else mtp
        partners = " or ".join(pair.mtp for pair in PAIRS if pair.base == base)
        raise UnsupportedError(
            f"{base} goes with --mtp-quant {partners}",
            found=f"--mtp-quant {found}",
            todo="All pairs: mtp-export quantize --list. --allow-untested-pair builds this one all"
            " the same",
        )
    return False


def weigh(family: ModelSpec, scheme: str, in_part: Callable[[TensorSpec], bool]) -> Weight:
    """Return the size of a part under a scheme, from the family's shapes."""
    storages = SCHEMES[scheme].with_tables
    parameters = size_bytes = 0
    alike: dict[tuple[Role, tuple[int, ...]], int] = {}  # bytes: thousands have the same shape
    for spec in family.tensors.values():
        if not in_part(spec):
            continue
        parameters += prod(spec.shape)
        if spec.role in storages and len(spec.shape) == 2:
            if (spec.role, spec.shape) not in alike:
                stored_as = FORMATS[storages[spec.role]].of_options(FormatOptions())
                stored_as = stored_as.for_columns(spec.shape[-1])
                tensors = stored_as.tensors(spec.name, spec.shape)
                alike[spec.role, spec.shape] = sum(tensor.size_bytes for tensor in tensors)
            size_bytes += alike[spec.role, spec.shape]
        else:
            size_bytes += tensor_bytes(spec.dtypes[0], spec.shape)
    return Weight(parameters, size_bytes)
