"""ModelOpt: nvfp4 or fp8 for every linear that no pattern of `ignore` names.

Sources: vLLM `quantization/modelopt.py`, SGLang `quantization/modelopt_quant.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import Fp8Tensor, NvFp4, WeightFormat
from mtp_checkpoints.quantization.method import Method, Unfused, names_in
from mtp_checkpoints.quantization.native import Config

_IGNORE = "ignore"
_NESTED, _EXCLUDED = "quantization", "exclude_modules"  # as hf_quant_config.json has it
# A head is a linear to engines.
_ROLES = (*LINEAR_ROLES, Role.HEAD)
_ALGORITHMS: dict[str, WeightFormat] = {"NVFP4": NvFp4(), "FP8": Fp8Tensor()}


@dataclass(frozen=True)
class _ModelOpt(Unfused):
    """One format for every linear whose name no pattern matches or is a part of."""

    format: WeightFormat
    patterns: tuple[str, ...]

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        skipped = role not in _ROLES or any(
            pattern in module or fnmatchcase(module, pattern) for pattern in self.patterns
        )
        return None if skipped else self.format


def _read(quantization: Mapping[str, Any]) -> _ModelOpt:
    """Read a quantization_config (UnsupportedError for another algorithm)."""
    flat = flattened(quantization)
    algorithm = str(flat.get("quant_algo")).upper()
    if algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            "config.json names a ModelOpt algorithm that this tool does not read",
            expected=f"quant_algo {' or '.join(_ALGORITHMS)}",
            found=repr(flat.get("quant_algo"))[:100],
        )
    return _ModelOpt(_ALGORITHMS[algorithm], tuple(names_in(flat, _IGNORE)))


def flattened(quantization: Mapping[str, Any]) -> Config:
    """Return a config in the form of config.json, where it has that of hf_quant_config.json."""
    nested = quantization.get(_NESTED)
    own: Config = dict(quantization)
    if isinstance(nested, dict):
        own = {key: value for key, value in own.items() if key != _NESTED} | nested
    excluded = own.pop(_EXCLUDED, None)
    if own.get(_IGNORE) is None and excluded is not None:
        own[_IGNORE] = excluded
    return {"quant_method": "modelopt", **own}


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    flat = flattened(quantization)
    names = [*names_in(flat, _IGNORE), *(f"{module}*" for module in modules)]
    return {**flat, _IGNORE: list(dict.fromkeys(names))}


MODELOPT = Method(_read, leave_out=_leave_out)
