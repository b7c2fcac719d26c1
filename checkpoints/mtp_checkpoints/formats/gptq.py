"""GPTQ's layout: words of 4 or 8 bits along the input channels, which may be permuted.

Sources: AutoGPTQ and GPTQModel, `QuantLinear`; of engines, which drop g_idx where desc_act is
false, vLLM's and SGLang's `gptq.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import Place
from mtp_checkpoints.formats.int_words import EightBits, InputWords

if TYPE_CHECKING:
    import torch

_GROUP_OF_ROW = "g_idx"


@dataclass(frozen=True)
class GptqWords(InputWords):
    """Words with g_idx I32 [K], the group of every input channel.

    permuted: g_idx is read, as engines do where desc_act is true; else channels are in order,
    whatever it holds.
    """

    permuted: bool = False

    @property
    def has_row_codes(self) -> bool:
        return not self.permuted  # of which each column has a scale of its own

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        group_of_row = OutputTensor(f"{module}.{_GROUP_OF_ROW}", DType.I32, (shape[1],))
        return (*super().tensors(name, shape), group_of_row)

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

    def _group_of_columns(
        self, tensors: Sequence[torch.Tensor], in_order: torch.Tensor
    ) -> torch.Tensor:
        return tensors[3].long() if self.permuted else in_order

    def _groups_read(self, columns: range, total: int) -> range:
        """Return all groups where g_idx alone says what columns are permuted to."""
        groups = super()._groups_read(columns, total)
        return range(self._groups(total)) if self.permuted else groups

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        return (*super().places(rows, columns, shape), (columns, None))


@dataclass(frozen=True)
class GptqInt4(GptqWords):
    """qweight I32 [K/8, N], scales [K/group, N], qzeros I32 [K/group, N/8], g_idx I32 [K].

    zeros_less_one: as format v1 has them.
    """

    storage: ClassVar[str] = "gptq_int4"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)


@dataclass(frozen=True)
class GptqInt8(GptqWords, EightBits):
    """qweight I32 [K/4, N], scales [K/group, N], qzeros I32 [K/group, N/4], g_idx I32 [K]."""

    storage: ClassVar[str] = "gptq_int8"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)
