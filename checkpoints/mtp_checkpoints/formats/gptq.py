"""GPTQ's layout: int4 words along the input channels, which may be permuted. Source: AutoGPTQ and
GPTQModel, `QuantLinear`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import Place
from mtp_checkpoints.formats.int4_words import (
    CODES_PER_WORD,
    Int4Words,
    unpacked_columns,
    unpacked_rows,
)

if TYPE_CHECKING:
    import torch

_GROUP_OF_ROW = "g_idx"


@dataclass(frozen=True)
class GptqInt4(Int4Words):
    """qweight I32 [K/8, N], scales [K/group, N], qzeros I32 [K/group, N/8], g_idx I32 [K], the
    group of every input channel.

    zeros_less_one: qzeros hold zero points less one, as format v1 has them.
    """

    zeros_less_one: bool = True

    storage: ClassVar[str] = "gptq_int4"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)
    columns_per_word: ClassVar[int] = CODES_PER_WORD

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        return (
            OutputTensor(f"{module}.qweight", DType.I32, (columns // CODES_PER_WORD, rows)),
            *self._scale_and_zeros(module, shape),
            OutputTensor(f"{module}.{_GROUP_OF_ROW}", DType.I32, (columns,)),
        )

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        groups = self._groups(shape[1])
        for name, stored in tensors.items():
            outside = (stored < 0) | (stored >= groups)
            if name.endswith(f".{_GROUP_OF_ROW}") and outside.any():
                raise InvalidInputError(
                    f"Tensor {name} names groups that the weight does not have",
                    expected=f"numbers from 0 to {groups - 1}",
                    found=stored[outside][:3].tolist(),
                    todo="Get the checkpoint again",
                )

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpacked_rows(words)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        stored = unpacked_columns(words)
        return (stored + 1) & 0xF if self.zeros_less_one else stored

    def _group_of_columns(
        self, tensors: Sequence[torch.Tensor], in_order: torch.Tensor
    ) -> torch.Tensor:
        return tensors[3].long()

    def _groups_read(self, columns: range, total: int) -> range:
        """Return all groups: what columns are permuted to, g_idx alone says."""
        return range(self._groups(total))

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        return (*super().places(rows, columns, shape), (columns, None))
