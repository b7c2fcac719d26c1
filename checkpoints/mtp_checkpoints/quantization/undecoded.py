"""Quantizations of others whose numbers are not decoded here, and the lists by which engines that
read them build modules unquantized: all that a graft onto such a main model needs.

Sources: vLLM and SGLang `quantization/quark`; SGLang `quantization/bitsandbytes.py` and
transformers' `should_convert_module`; mlx-lm's `load_model`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.containers.base import QUANTIZATION
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.method import names_in
from mtp_checkpoints.quantization.native import MLX, Config, is_mlx, quantization_of

_QUARK_LIST, _BITSANDBYTES_LIST = "exclude", "llm_int8_skip_modules"
_MLX = "mlx"  # no quant_method: its configs name none
_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED = ".switch_mlp."  # experts as mlx-lm has them
_MLX_ROLES = (*LINEAR_ROLES, Role.MTP_PROJECTION, Role.EMBEDDING, Role.HEAD)


@dataclass(frozen=True)
class Undecoded:
    """A quantization whose numbers are not decoded.

    name is what manifests record, title its name in words. leave_out returns a config.json that
    leaves the MTP modules of a family unquantized. targets are those whose engines read it.
    renames: weights have other names than the released ones, so that none is looked for.
    """

    name: str
    title: str
    leave_out: Callable[[Mapping[str, Any], ModelSpec], Config]
    targets: frozenset[str]
    renames: bool = False

    @property
    def why_not_tested(self) -> str:
        """The reason why nothing is told of the numbers."""
        return f"values not decoded: this tool does not read {self.title}'s numbers"

    def refusal(self, where: object = "") -> UnsupportedError:
        """Return the error of what needs them."""
        return UnsupportedError(
            f"Values not decoded: this tool does not read {self.title}'s numbers",
            where=where,
            expected="a checkpoint in a format that it reads, or unquantized",
            found=f"a quantization_config of {self.title}",
        )


def undecoded_of(config: Mapping[str, Any]) -> Undecoded | None:
    """Return the quantization of a config.json; None for one that is decoded, or not known."""
    quantization = quantization_of(config)
    name = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return UNDECODED.get(_MLX if is_mlx(config) else str(name))


def _with_listed(config: Mapping[str, Any], key: str, entries: Iterable[str]) -> Config:
    """Return a config.json with more entries in a list of its quantization_config
    (InvalidInputError for what is none)."""
    quantization = quantization_of(config)
    listed = dict.fromkeys([*names_in(quantization, key), *entries])
    return {**config, QUANTIZATION: {**quantization, key: [*listed]}}


def _beside_quark(config: Mapping[str, Any], family: ModelSpec) -> Config:
    """Add patterns: engines compare names as a whole, and take those with re: for patterns that
    match from the start."""
    patterns = (rf"re:{re.escape(module.name)}\." for module in family.mtp)
    return _with_listed(config, _QUARK_LIST, patterns)


def _beside_bitsandbytes(config: Mapping[str, Any], family: ModelSpec) -> Config:
    """Add modules, with all below them; and the head where nothing is listed, which transformers
    leaves out then alone."""
    is_listed = quantization_of(config).get(_BITSANDBYTES_LIST) is not None
    names = [*([] if is_listed else [family.head]), *(module.name for module in family.mtp)]
    return _with_listed(config, _BITSANDBYTES_LIST, names)


def _beside_mlx(config: Mapping[str, Any], family: ModelSpec) -> Config:
    """Add each module by its name, under both keys that mlx-lm writes (older versions one)."""
    matrices = (spec for spec in family.mtp_tensors.values() if spec.role in _MLX_ROLES)
    names = dict.fromkeys(_EXPERT.sub(_STACKED, spec.module) for spec in matrices)
    own = {**(config.get(MLX) or quantization_of(config)), **dict.fromkeys(names, False)}
    return {**config, MLX: own, QUANTIZATION: own}


UNDECODED = {
    known.name: known
    for known in (
        Undecoded("quark", "Quark", _beside_quark, frozenset({"hf", "vllm", "sglang"})),
        Undecoded(
            "bitsandbytes", "bitsandbytes", _beside_bitsandbytes, frozenset({"hf", "sglang"})
        ),
        Undecoded(_MLX, "MLX", _beside_mlx, frozenset({"hf"}), renames=True),
    )
}
