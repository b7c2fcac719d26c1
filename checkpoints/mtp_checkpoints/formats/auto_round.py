"""AutoRound's layout: GPTQ's int4 words without a permutation. Source: AutoRound,
`export/export_to_autoround` and `inference/backend.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.int4_words import (
    CODES_PER_WORD,
    Int4Words,
    unpacked_columns,
    unpacked_rows,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AutoRoundInt4(Int4Words):
    """qweight I32 [K/8, N], scales [K/group, N], qzeros I32 [K/group, N/8].

    zeros_less_one: qzeros hold zero points less one, as packing auto_round:auto_gptq has them.
    """

    zeros_less_one: bool = True

    storage: ClassVar[str] = "auto_round_int4"
    methods: ClassVar[tuple[str, ...]] = ("auto-round",)
    columns_per_word: ClassVar[int] = CODES_PER_WORD

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        words = (shape[1] // CODES_PER_WORD, shape[0])
        return (
            OutputTensor(f"{module}.qweight", DType.I32, words),
            *self._scale_and_zeros(module, shape),
        )

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpacked_rows(words)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        stored = unpacked_columns(words)
        return (stored + 1) & 0xF if self.zeros_less_one else stored
