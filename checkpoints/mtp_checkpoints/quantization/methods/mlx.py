"""MLX, whose configs name no quant_method: affine groups for every linear layer, embedding and
head; an entry by a module's name changes or leaves out that one.

Source: mlx-lm's `load_model` and `quantize_model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import MlxAffine, WeightFormat
from mtp_checkpoints.quantization.method import Method, Unfused, number_of
from mtp_checkpoints.quantization.native import Config
from mtp_checkpoints.quantization.undecoded import MLX_METHOD, UNDECODED

_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED = ".switch_mlp."  # experts as mlx-lm has them
_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LAYER = ".layers."
_OUTER = re.compile(r"^(language_model\.|model\.)+")  # before the names of a decoder's modules
_TABLES = (Role.EMBEDDING, Role.HEAD)
_LINEARS = (*LINEAR_ROLES, Role.DELTA_GATES, Role.INDEXER_HEADS, Role.MTP_PROJECTION)
_BITS, _GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_AFFINE = "affine"


@dataclass(frozen=True)
class _Mlx(Unfused):
    """The format of a module that is named, else the usual one; None for one that is left out. No
    MTP layer is known to mlx-lm: tables in one are none of its own."""

    usual: WeightFormat
    named: Mapping[str, WeightFormat | None]

    loads_together: ClassVar[bool] = False

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        is_table = role in _TABLES and _LAYER not in module
        usual = self.usual if role in _LINEARS or is_table else None
        return self.named.get(_inner(_EXPERT.sub(_STACKED, module)), usual)


def _inner(name: str) -> str:
    """Return a module's name in its decoder, before which released models and mlx-lm's differ."""
    return _OUTER.sub("", name)


def _read(quantization: Mapping[str, Any]) -> _Mlx:
    """Read a quantization_config (UnsupportedError for another mode)."""
    named = {
        _inner(name): _format({**quantization, **own}) if isinstance(own, dict) else None
        for name, own in quantization.items()
        if own is False or isinstance(own, dict)
    }
    return _Mlx(_format(quantization), named)


def _format(quantization: Mapping[str, Any]) -> WeightFormat:
    bits, size = (number_of(quantization, key) for key in ("bits", "group_size"))
    mode = quantization.get("mode", _AFFINE)
    if bits not in _BITS or size not in _GROUP_SIZES or mode != _AFFINE:
        found = f"mode {mode}, {bits} bits in groups of {size}"
        raise UNDECODED[MLX_METHOD].refusal(found)
    return MlxAffine(size, bits)


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized by their whole names."""
    return {**quantization, **dict.fromkeys(_stacked(modules), False)}


def _stacked(modules: Sequence[str]) -> Iterator[str]:
    """Yield modules by mlx-lm's names, all experts of a layer as three."""
    for module in modules:
        layer, is_all, behind = module.partition(".experts")
        if is_all and not behind:
            yield from (f"{layer}{_STACKED}{last}" for last in _EXPERTS)
        else:
            yield _EXPERT.sub(_STACKED, module)


MLX = Method(
    _read,
    leave_out=_leave_out,
    whole_names=True,
    coded_by=("scales",),
    packs_projections=True,
)
