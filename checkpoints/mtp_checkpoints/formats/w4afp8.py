"""SGLang's w4afp8: int4 experts in groups of 128 that run with activations in fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import KernelFormat
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, Bug, FormatGate, packing_bugs

if TYPE_CHECKING:
    import torch

W4AFP8_GROUP = 128
_INPUT_SCALES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True)
class W4AFp8(KernelFormat):
    """Codes I8 [N, K/2], scale F32 [N, K/128], and an input scale F32 [1] beside the module."""

    storage: ClassVar[str] = "w4afp8"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    bugs: ClassVar[tuple[Bug, ...]] = packing_bugs(4)
    methods: ClassVar[tuple[str, ...]] = ("w4afp8",)
    code_offset: ClassVar[int | None] = 8
    operation: ClassVar[str] = "quantize_w4afp8"
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})
    elements_per_code: ClassVar[int] = 2
    of_experts: ClassVar[bool] = True

    @property
    def k_divisor(self) -> int:
        return W4AFP8_GROUP

    @property
    def k_unit(self) -> str:
        return "the group size"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        parent, _, projection = module.rpartition(".")
        return (
            OutputTensor(name, DType.I8, (rows, columns // self.elements_per_code)),
            OutputTensor(f"{name}_scale_inv", DType.F32, (rows, columns // W4AFP8_GROUP)),
            OutputTensor(f"{parent}.{_INPUT_SCALES[projection]}.input_scale", DType.F32, (1,)),
        )

    def kernel_options(self, scale_rule: str) -> dict[str, Any]:
        return {"scale_rule": scale_rule}

    def constants(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return an input scale of 1, which leaves the activations as they are."""
        import numpy as np

        return (np.ones(1, np.float32),)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        for name, scale in tensors.items():
            if not (scale.isfinite() & (scale > 0)).all():
                raise InvalidInputError(
                    f"Tensor {name} is no scale",
                    expected="a finite number above 0",
                    found=scale.tolist(),
                )
