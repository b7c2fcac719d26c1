"""Codes of 4 or 8 bits in 32-bit words with a zero point per group, as AWQ, GPTQ and AutoRound
store them: matrices lie as [K, N], and a weight is (code - zero point) * scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, Place, ReadOnlyFormat
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, INT8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.containers.base import TensorInfo
    from mtp_kernels.quantize.row_codes import RowCodes

CODES_PER_WORD = 8  # of 4 bits
_WORD_BITS = 32
_ONES = {4: 0x11111111, 8: 0x01010101}  # words that hold one in each place, by bits
WHOLE_ROW = -1  # as a group size: one group per output channel
_SCALE_DTYPES = (DType.F16, DType.BF16, DType.F32)


@dataclass(frozen=True)
class ZeroPoints(ReadOnlyFormat):
    """Codes of a matrix in words, and a scale and a zero point per group; read as codes [N, K] with
    the zero points taken off, I8 of 4 bits and I16 of 8, and scales [N, K/group]."""

    group_size: int

    bits: ClassVar[int] = 4
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    reads_whole: ClassVar[bool] = True
    word_rows: ClassVar[int] = CODES_PER_WORD  # of zero points, if not of codes

    @property
    def has_row_codes(self) -> bool:
        return True

    @property
    def k_divisor(self) -> int:
        return self.word_rows if self.group_size == WHOLE_ROW else self.group_size

    @property
    def k_unit(self) -> str:
        return "the group size"

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        factors = scale.float()
        if not factors.isfinite().all():
            raise ValueError("group scale: expected finite numbers")
        columns = codes.shape[1] // scale.shape[1]
        return (codes.float() * factors.repeat_interleave(columns, dim=1)).to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import integer_rows

        return integer_rows(codes, scale, self.bits)

    def row_bytes(self, tensors: Sequence[TensorInfo], rows: int) -> int:
        return tensors[0].size_bytes + 2 * 4 * prod(tensors[1].shape)


class IntWords(ZeroPoints):
    """Codes qweight, scales [K/group, N], zero points qzeros [K/group, N/w] with w numbers in a
    word."""

    columns_per_word: ClassVar[int]  # of qweight

    @abstractmethod
    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        """Return the codes [K, n] of qweight."""

    @abstractmethod
    def zero_points(self, words: torch.Tensor) -> torch.Tensor:
        """Return the zero points [K/group, n] of qzeros."""

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        groups = self._groups_read(columns, shape[1])
        rows_per_word = self.word_rows // self.columns_per_word
        return (
            (divided(columns, self.columns_per_word), divided(rows, rows_per_word)),
            (groups, rows),
            (groups, divided(rows, self.word_rows)),
        )

    def _groups_read(self, columns: range, total: int) -> range:
        """Return the groups of some columns out of all, as far as these alone say."""
        size = total if self.group_size == WHOLE_ROW else self.group_size
        return range(columns.start // size, -(-columns.stop // size))

    def _groups(self, columns: int) -> int:
        return 1 if self.group_size == WHOLE_ROW else columns // self.group_size

    def _scale_and_zeros(self, module: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        rows, groups = shape[0], self._groups(shape[1])
        return (
            OutputTensor(f"{module}.scales", DType.F16, (groups, rows)),
            OutputTensor(f"{module}.qzeros", DType.I32, (groups, rows // self.word_rows)),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _SCALE_DTYPES if tensor.dtype == DType.F16 else (tensor.dtype,)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Accept zero points whatever they are: every word is full of them."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        """Decode a weight, or some columns of one with their groups and perhaps others."""
        import torch

        words, scale, zeros = tensors[:3]
        codes = self._codes(words)
        places = torch.arange(len(codes), device=codes.device)
        size = len(codes) if self.group_size == WHOLE_ROW else self.group_size
        groups = self._group_of_columns(tensors, places // size)
        codes = codes - self.zero_points(zeros)[groups]
        in_order = groups[0] + places // size
        # A scale for each column where the groups are permuted.
        scale = scale[groups[::size] if torch.equal(groups, in_order) else groups]
        return EncodedWeight(self, codes.t().contiguous(), scale.t().contiguous())

    def _group_of_columns(
        self, tensors: Sequence[torch.Tensor], in_order: torch.Tensor
    ) -> torch.Tensor:
        """Return the group of each of the columns; in_order are those of unpermuted ones."""
        return in_order

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        tensors = (source.whole_codes, *source.others)
        columns = len(tensors[0]) * self.columns_per_word
        places = self.places(range(start, stop), range(columns), (stop, columns))
        return self.encoded([_part(tensor, at) for tensor, at in zip(tensors, places, strict=True)])


@dataclass(frozen=True)
class InputWords(IntWords):
    """Words along the input channels: qweight I32 [K/w, N].

    zeros_less_one: qzeros hold zero points less one, as GPTQModel's `convert_gptq_v2_to_v1_format`
    takes it from whole words; AutoRound stores none below 0.
    """

    zeros_less_one: bool = True

    columns_per_word: ClassVar[int] = CODES_PER_WORD

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        words = (shape[1] // self.columns_per_word, shape[0])
        return (
            OutputTensor(f"{module}.qweight", DType.I32, words),
            *self._scale_and_zeros(module, shape),
        )

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpacked_rows(words, self.bits)

    def zero_points(self, words: torch.Tensor) -> torch.Tensor:
        # One was taken from each number by one difference of words: 0 has borrowed from the next.
        return unpacked_columns(words + _ONES[self.bits] * self.zeros_less_one, self.bits)


class EightBits(InputWords):
    """The same with four codes of 8 bits in a word."""

    bits: ClassVar[int] = 8
    gate: ClassVar[FormatGate] = INT8_GATE
    word_rows: ClassVar[int] = _WORD_BITS // 8
    columns_per_word: ClassVar[int] = _WORD_BITS // 8


def divided(part: range, size: int) -> range:
    """Return the words, each of `size` entries, that a part lies in."""
    return range(part.start // size, -(-part.stop // size))


def _part(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    rows, columns = place
    part = tensor[rows.start : rows.stop]
    return part if columns is None else part[:, columns.start : columns.stop]


def unpacked_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes [w n, m] of words [n, m]: each holds w rows, the first in the lowest bits."""
    return _numbers(words, bits).movedim(-1, 1).reshape(-1, words.shape[1])


def unpacked_columns(
    words: torch.Tensor, bits: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Return codes [n, w m] of words [n, m]: each word holds w columns. order[i] is the place in
    the word, counted from the lowest bits, of column i; by default i."""
    numbers = _numbers(words, bits)
    in_order = numbers if order is None else numbers[..., list(order)]
    return in_order.reshape(words.shape[0], -1)


def _numbers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of every word along a last dimension: I8 of 4 bits, I16 of 8, so that the
    difference of two has room."""
    import torch

    shifts = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
    found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.to(torch.int16 if bits == 8 else torch.int8)
