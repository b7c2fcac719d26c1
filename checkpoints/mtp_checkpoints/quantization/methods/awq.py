"""AWQ: int4 for every linear but those of modules_to_not_convert, which are parts of names.

Sources: vLLM `quantization/auto_awq.py`, SGLang `quantization/awq`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import AwqInt4, WeightFormat
from mtp_checkpoints.quantization.method import (
    Method,
    Unfused,
    group_size,
    names_in,
    number_of,
)
from mtp_checkpoints.quantization.native import Config

_LEFT_OUT = "modules_to_not_convert"
# Engines ask for linears that they load as one by its name first.
_JOINED = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
_JOINED |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")


@dataclass(frozen=True)
class _Awq(Unfused):
    """One format for every linear of whose names none has one of these parts."""

    format: WeightFormat
    left_out: tuple[str, ...]

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        parent, _, last = module.rpartition(".")
        names = (module, f"{parent}.{_JOINED.get(last, last)}")
        listed = any(part in name for part in self.left_out for name in names)
        return None if listed or role not in LINEAR_ROLES else self.format


def _read(quantization: Mapping[str, Any]) -> _Awq:
    """Read a quantization_config (UnsupportedError for another layout than gemm's int4)."""
    bits = number_of(quantization, "bits", "w_bit")
    version = str(quantization.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or quantization.get("lm_head"):
        raise UnsupportedError(
            "config.json describes AWQ weights that this tool does not read",
            expected="4 bits in the gemm layout, the head unquantized",
            found=f"{bits} bits, version {version}, lm_head {quantization.get('lm_head')}",
        )
    size = group_size(quantization, "group_size", "q_group_size")
    return _Awq(AwqInt4(size), tuple(names_in(quantization, _LEFT_OUT)))


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    names = [*names_in(quantization, _LEFT_OUT), *modules]
    return {**quantization, _LEFT_OUT: list(dict.fromkeys(names))}


AWQ = Method(_read, leave_out=_leave_out, absent_key=_LEFT_OUT, experts_as_one=True)
