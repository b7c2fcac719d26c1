"""4-bit codes in 32-bit words with a zero point per group, as AWQ and GPTQ store them: matrices
lie as [K, N], and a weight is (code - zero point) * scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, Place, ReadOnlyFormat, RowSource
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, FormatGate

if TYPE_CHECKING:
    import torch

CODES_PER_WORD = 8
WHOLE_ROW = -1  # as a group size: one group per output channel
_SCALE_DTYPES = (DType.F16, DType.BF16, DType.F32)
_IN_ORDER = tuple(range(CODES_PER_WORD))


@dataclass(frozen=True)
class Int4Words(ReadOnlyFormat):
    """Codes qweight, scales [K/group, N], zero points qzeros [K/group, N/8]; read as codes I8
    [N, K] with the zero points taken off, and scales [N, K/group]."""

    group_size: int

    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    reads_whole: ClassVar[bool] = True
    word_rows: ClassVar[int] = CODES_PER_WORD  # of qzeros, if not of qweight
    columns_per_word: ClassVar[int]  # of qweight

    @property
    def k_divisor(self) -> int:
        return CODES_PER_WORD if self.group_size == WHOLE_ROW else self.group_size

    @property
    def k_unit(self) -> str:
        return "the group size"

    @abstractmethod
    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        """Return the codes [K, n] of qweight."""

    @abstractmethod
    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Return the zero points [K/group, n] of qzeros."""

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        groups = self._groups_read(columns, shape[1])
        rows_per_word = CODES_PER_WORD // self.columns_per_word
        return (
            (_divided(columns, self.columns_per_word), _divided(rows, rows_per_word)),
            (groups, rows),
            (groups, _divided(rows, CODES_PER_WORD)),
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
            OutputTensor(f"{module}.qzeros", DType.I32, (groups, rows // CODES_PER_WORD)),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _SCALE_DTYPES if tensor.dtype == DType.F16 else (tensor.dtype,)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Accept zero points whatever they are: every word holds eight."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        """Decode a weight, or some columns of one with their groups and perhaps others."""
        import torch

        words, scale, zeros = tensors[:3]
        codes = self._codes(words)
        places = torch.arange(len(codes), device=codes.device)
        size = len(codes) if self.group_size == WHOLE_ROW else self.group_size
        groups = self._group_of_columns(tensors, places // size)
        codes = codes - self._zeros(zeros)[groups]
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

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        factors = scale.float()
        if not factors.isfinite().all():
            raise ValueError("group scale: expected finite numbers")
        columns = codes.shape[1] // scale.shape[1]
        return (codes.float() * factors.repeat_interleave(columns, dim=1)).to(dtype)


def _divided(part: range, size: int) -> range:
    """Return the words, each of `size` entries, that a part lies in."""
    return range(part.start // size, -(-part.stop // size))


def _part(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    rows, columns = place
    part = tensor[rows.start : rows.stop]
    return part if columns is None else part[:, columns.start : columns.stop]


def unpacked_rows(words: torch.Tensor) -> torch.Tensor:
    """Return codes I8 [8 n, m] of words [n, m]: each holds eight rows, the first in the lowest
    bits."""
    return _nibbles(words).movedim(-1, 1).reshape(-1, words.shape[1])


def unpacked_columns(words: torch.Tensor, order: Sequence[int] = _IN_ORDER) -> torch.Tensor:
    """Return codes I8 [n, 8 m] of words [n, m]: each word holds eight columns. order[i] is the
    place in the word, counted from the lowest bits, of column i."""
    return _nibbles(words)[..., list(order)].reshape(words.shape[0], -1)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the eight 4-bit numbers of every word, as I8 along a last dimension."""
    import torch

    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.int8)
