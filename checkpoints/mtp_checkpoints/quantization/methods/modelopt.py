"""ModelOpt: nvfp4 or fp8 for every linear that no pattern of `ignore` names.

Sources: vLLM `quantization/modelopt.py`, SGLang `quantization/modelopt_quant.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import Fp8Tensor, NvFp4, NvFp4A16, Unquantized, WeightFormat
from mtp_checkpoints.formats.nvfp4 import NVFP4_GROUP
from mtp_checkpoints.quantization.method import Method, Unfused, WrittenModel, names_in
from mtp_checkpoints.quantization.native import Config

_IGNORE = "ignore"
_NESTED, _EXCLUDED = "quantization", "exclude_modules"  # as hf_quant_config.json has it
# A head is a linear to engines.
_ROLES = (*LINEAR_ROLES, Role.HEAD)
_ALGORITHMS: dict[str, WeightFormat] = {
    "NVFP4": NvFp4(),
    "W4A16_NVFP4": NvFp4A16(),
    "FP8": Fp8Tensor(),
}
_NUMBERS = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": NVFP4_GROUP}
_LAYER = re.compile(r"\.layers\.\d+\.")


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


def _key_of(quantization: Config, key: str) -> str:
    """Return the name that a list has in the form that a config has."""
    nested = quantization.get(_NESTED)
    holder = nested if isinstance(nested, dict) else quantization
    return (
        _EXCLUDED if key == _IGNORE and holder.get(_IGNORE) is None and _EXCLUDED in holder else key
    )


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    flat = flattened(quantization)
    names = [*names_in(flat, _IGNORE), *(f"{module}*" for module in modules)]
    return {**flat, _IGNORE: list(dict.fromkeys(names))}


def _write(model: WrittenModel) -> Config:
    """Return a config with one algorithm for the main model's linears but those that are listed, as
    all of the MTP layers are: no engine reads others there."""
    assert not model.mtp.quantized_roles, "a plan refuses it"
    (storage,) = {*model.main.storages.values()} - {Unquantized.storage}
    names = (name for name, form in _ALGORITHMS.items() if form.storage == storage)
    inputs = _NUMBERS if storage == NvFp4.storage else None
    group = {"targets": ["Linear"], "weights": _NUMBERS, "input_activations": inputs}
    return {
        "quant_method": "modelopt",
        "quant_algo": next(names),
        "config_groups": {"group_0": group},
        "group_size": NVFP4_GROUP,
        "kv_cache_scheme": None,
        _IGNORE: _unquantized(model),
    }


def _unquantized(model: WrittenModel) -> list[str]:
    """Return names and patterns of the matrices that are not quantized: of main layers once for
    all, of MTP layers their own."""
    family = model.family
    main = (spec for spec in family.tensors.values() if spec.mtp_layer is None)
    plain = (Unquantized.storage, None)
    modules = (
        spec.module for spec in main if len(spec.shape) > 1 and model.main.storage_of(spec) in plain
    )
    named = dict.fromkeys(_LAYER.sub(".layers.*.", module) for module in modules)
    if family.mtp:
        own = (module.name for module in family.mtp)
        of_engines = filter(None, [*family.mtp_names, family.vllm.projection])
        named |= dict.fromkeys(f"{module}*" for module in (*own, *of_engines))
    return [*named, *family.carried_modules]


MODELOPT = Method(_read, leave_out=_leave_out, write=_write, key_of=_key_of)
