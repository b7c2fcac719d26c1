"""Native fp8 blocks, as DeepSeek releases them, and SGLang's w4afp8, which has int4 experts beside.

Sources: vLLM and SGLang `quantization/fp8`, SGLang `quantization/w4afp8`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.dtypes import SCALE_DTYPES
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import Fp8Block, Unquantized, W4AFp8, WeightFormat
from mtp_checkpoints.quantization.method import (
    SGLANG,
    Method,
    PartStorage,
    QuantConfig,
    Unfused,
    WrittenModel,
    modules_of,
)
from mtp_checkpoints.quantization.native import (
    NATIVE_FP8,
    Config,
    NativeFp8,
    left_out,
    native_fp8,
    with_left_out,
)


@dataclass(frozen=True)
class _Fp8(Unfused):
    """Native fp8 blocks for every linear that is not left out, and one format for the experts."""

    native: NativeFp8
    experts: WeightFormat | None = None

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in LINEAR_ROLES or not self.native.covers(module):
            return None
        if role is Role.ROUTED_EXPERT and self.experts is not None:
            return self.experts
        return Fp8Block(scale_dtypes=self.native.scale_dtypes)


def _read_fp8(quantization: Mapping[str, Any]) -> QuantConfig:
    native = native_fp8(quantization)
    assert native is not None, "a config without quantization has no method"
    return _Fp8(native)


def _read_w4afp8(quantization: Mapping[str, Any]) -> QuantConfig:
    return _Fp8(NativeFp8(SCALE_DTYPES, left_out(quantization)), W4AFp8())


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    return with_left_out(quantization, list(modules))


def _describe(quantization: Config, family: ModelSpec, draft: PartStorage) -> Config:
    """Return a config that lists a draft's linears that stay as stored, beside those in fp8."""
    plain = (None, Unquantized.storage)
    names = (
        name
        for spec in family.mtp_tensors.values()
        if spec.is_linear_weight and draft.storage_of(spec) in plain
        for module in modules_of([spec])
        for name in family.names_of(module, spec.mtp_layer)
    )
    return _leave_out(quantization, [*dict.fromkeys(names)])


def _write_fp8(model: WrittenModel) -> Config | None:
    """Return block fp8 as DeepSeek releases it; parts in bf16 are listed as left out."""
    if Fp8Block.storage not in model.storages:
        return None
    quantization = NATIVE_FP8 if model.native is None else model.quantization
    assert isinstance(quantization, dict), "native fp8 was read from it"
    return with_left_out(quantization, [*model.family.plain_matrices, *_bf16_modules(model)])


def _bf16_modules(model: WrittenModel) -> list[str]:
    """Return the linears of a part in bf16 beside one in fp8; a layer's experts as one name."""
    names: dict[str, None] = {}
    for spec in model.family.tensors.values():
        part = model.main if spec.mtp_layer is None else model.mtp
        if part.storage_of(spec) == Unquantized.storage:
            (module,) = modules_of([spec])
            names |= dict.fromkeys(model.family.names_of(module, spec.mtp_layer))
    return list(names)


def _write_w4afp8(model: WrittenModel) -> Config:
    model.check_nothing_left_out("--format w4afp8")
    model.check_no_plain_matrices("--format w4afp8")
    return {"quant_method": "w4afp8"}


FP8 = Method(
    _read_fp8,
    leave_out=_leave_out,
    describe=_describe,
    describes=frozenset({Fp8Block.storage}),
    write=_write_fp8,
    whole_names=True,
)
W4AFP8 = Method(
    _read_w4afp8,
    write=_write_w4afp8,
    dialect=SGLANG,
)
