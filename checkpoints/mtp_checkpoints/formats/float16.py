"""Half precision, as GGUF files have it: weights that are rounded once, none of them too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.formats.ggml_blocks import GGUF
from mtp_checkpoints.formats.unquantized import Values
from mtp_checkpoints.formats.verification import BF16_GATE, FormatGate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Float16(Values):
    """Values in half precision, each rounded once to the nearest, of two to the even one."""

    dtype: ClassVar[DType] = DType.F16
    storage: ClassVar[str] = "f16"
    gate: ClassVar[FormatGate] = BF16_GATE
    operation: ClassVar[str] = "round_f16"
    methods: ClassVar[tuple[str, ...]] = (GGUF,)
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        """Return finite rows [n, K] of fp32 in fp16 (OutOfRangeError for numbers beyond it)."""
        import torch

        from mtp_kernels.quantize.layouts import OutOfRangeError

        halves = values.to(torch.float16)
        if not halves.isfinite().all():
            raise OutOfRangeError(
                f"{self.storage}: expected magnitudes of at most"
                f" {torch.finfo(torch.float16).max:.0f}, found {values.abs().max():.6g}"
            )
        return (halves,)
