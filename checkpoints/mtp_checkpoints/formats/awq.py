"""AWQ's gemm layout: int4 words along the output channels. Source: AutoAWQ, `WQLinear_GEMM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.int_words import CODES_PER_WORD, IntWords, unpacked_columns

if TYPE_CHECKING:
    import torch

# A word is packed from these columns; _ORDER is where each column lies in it.
_PACKED = (0, 2, 4, 6, 1, 3, 5, 7)
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqInt4(IntWords):
    """qweight I32 [K, N/8], scales [K/group, N], qzeros I32 [K/group, N/8]."""

    storage: ClassVar[str] = "awq_int4"
    methods: ClassVar[tuple[str, ...]] = ("awq",)
    columns_per_word: ClassVar[int] = 1

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        words = (shape[1], shape[0] // CODES_PER_WORD)
        return (
            OutputTensor(f"{module}.qweight", DType.I32, words),
            *self._scale_and_zeros(module, shape),
        )

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpacked_columns(words, self.bits, _ORDER)

    def zero_points(self, words: torch.Tensor) -> torch.Tensor:
        return unpacked_columns(words, self.bits, _ORDER)

    @staticmethod
    def in_plain_order(rows: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the rows of a weight [N, ...], read in AWQ's order, as if its
        words had been packed from columns 0 to 7."""
        words = rows.reshape(-1, CODES_PER_WORD, *rows.shape[1:])
        return words[:, list(_PACKED)].reshape(rows.shape)
