"""bitsandbytes' layouts: int8 with a scale per output channel, and nf4 or fp4 in blocks of the
matrix as one row, whose scales may be quantized too.

Source: bitsandbytes, `nn/modules.py` and `functional.py` (`QuantState`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mtp_checkpoints.dtypes import ANY_LENGTH, DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import (
    EncodedWeight,
    Place,
    ReadOnlyFormat,
)
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, INT8_GATE, FormatGate
from mtp_checkpoints.sources.strict_json import parse

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize.row_codes import RowCodes

BLOCK = 64  # elements per scale, as transformers has them
_NESTED_BLOCK = 256  # scales per scale of theirs
_LARGEST = 127.0
_STATE = "quant_state.bitsandbytes__"
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_HALF = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_TABLES = {"nf4": NF4, "fp4": (*_FP4_HALF, *(-one for one in _FP4_HALF))}


@dataclass(frozen=True)
class BitsAndBytesInt8(ReadOnlyFormat):
    """Codes I8 [N, K], SCB F32 [N]: the largest magnitude of each row, and weight_format U8 []."""

    storage: ClassVar[str] = "bitsandbytes_int8"
    methods: ClassVar[tuple[str, ...]] = ("bitsandbytes",)
    gate: ClassVar[FormatGate] = INT8_GATE
    has_row_codes: ClassVar[bool] = True
    word_rows: ClassVar[int] = 1

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.I8, shape),
            OutputTensor(f"{module}.SCB", DType.F32, shape[:1]),
            OutputTensor(f"{module}.weight_format", DType.U8, ()),
        )

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        return ((rows, columns), (rows, None), (range(1), None))

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        for name, layout in tensors.items():
            if int(layout):
                raise InvalidInputError(
                    f"{name} is an order of the codes that no checkpoint has",
                    expected="0: row after row",
                    found=int(layout),
                )

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        return EncodedWeight(self, tensors[0], tensors[1].reshape(-1, 1) / _LARGEST)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        return self.encoded((source.codes(start, stop), source.others[0][start:stop]))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (codes.float() * _finite(scale)).to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import RowCodes

        return RowCodes(codes, _finite(scale), codes.shape[1])


class _State(NamedTuple):
    """Shape of a matrix, and the number that its nested scales were moved by."""

    shape: tuple[int, int]
    offset: float


@dataclass(frozen=True)
class BitsAndBytes4(ReadOnlyFormat):
    """weight U8 [N K / 2, 1], of two codes the first in the higher bits; weight.absmax [N K / 64],
    F32, or U8 where nested; weight.quant_map F32 [16], the numbers of the codes; nested_absmax and
    nested_quant_map of the scales, likewise; weight.quant_state, bytes of JSON.

    In memory codes [N, K] and scales [N, K / 64]; scales [N, K], one per element, where blocks run
    over the ends of rows. numbers: nf4 or fp4.
    """

    numbers: str
    nested: bool

    storage: ClassVar[str] = "bitsandbytes_4bit"
    methods: ClassVar[tuple[str, ...]] = ("bitsandbytes",)
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    reads_whole: ClassVar[bool] = True
    word_rows: ClassVar[int] = 1 << 62  # no row is apart from others
    is_one_row: ClassVar[bool] = True

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        elements = shape[0] * shape[1]
        blocks = -(-elements // BLOCK)
        nested = (
            (
                OutputTensor(f"{name}.nested_absmax", DType.F32, (-(-blocks // _NESTED_BLOCK),)),
                OutputTensor(f"{name}.nested_quant_map", DType.F32, (256,)),
            )
            if self.nested
            else ()
        )
        return (
            OutputTensor(name, DType.U8, (-(-elements // 2), 1)),
            OutputTensor(f"{name}.absmax", DType.U8 if self.nested else DType.F32, (blocks,)),
            OutputTensor(f"{name}.quant_map", DType.F32, (16,)),
            *nested,
            OutputTensor(f"{name}.{_STATE}{self.numbers}", DType.U8, (ANY_LENGTH,)),
        )

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Refuse another table of numbers, and a state of another matrix (InvalidInputError)."""
        import torch

        for name, stored in tensors.items():
            if name.endswith(".weight.quant_map"):
                table = torch.tensor(_TABLES[self.numbers], device=stored.device)
                if not torch.allclose(stored, table, atol=1e-6):
                    raise InvalidInputError(
                        f"{name} has other numbers than {self.numbers}",
                        expected=_shown(table),
                        found=_shown(stored),
                    )
            if f".{_STATE}" in name and (found := self._state(stored, name).shape) != shape:
                raise _unusable(name, f"shape {[*shape]}", f"shape {[*found]}")

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        import torch

        codes, scales, _, *nested, stored = tensors
        state = self._state(stored)
        rows, columns = state.shape
        indices = torch.stack((codes >> 4, codes & 15), dim=-1).flatten()[: rows * columns]
        if self.nested:
            factors, table = nested
            wide = factors.repeat_interleave(_NESTED_BLOCK)[: len(scales)]
            scales = table[scales.int()] * wide + state.offset
        if columns % BLOCK:
            scales = scales.repeat_interleave(BLOCK)[: rows * columns]
        return EncodedWeight(self, indices.reshape(rows, columns), scales.reshape(rows, -1))

    def _state(self, stored: torch.Tensor, name: str = "quant_state") -> _State:
        """Return what a state says (InvalidInputError for one that is unusable)."""
        try:
            said = parse(bytes(stored.tolist()))
        except ValueError as error:
            raise _unusable(name, "an object of JSON", str(error)) from error
        fields = said if isinstance(said, dict) else {}
        shape: Any = fields.get("shape")
        offset = fields.get("nested_offset", 0.0)
        kind = fields.get("quant_type"), fields.get("blocksize")
        nested = fields.get("nested_blocksize") == _NESTED_BLOCK and "nested_offset" in fields
        is_shape = isinstance(shape, list) and [*map(type, shape)] == [int, int] and min(shape) > 0
        if kind != (self.numbers, BLOCK) or nested != self.nested or not is_shape:
            wanted = f"a shape, {self.numbers}, blocksize {BLOCK}"
            wanted += f", nested_offset, nested_blocksize {_NESTED_BLOCK}" if self.nested else ""
            raise _unusable(name, wanted, repr(said)[:200])
        if not isinstance(offset, float):
            raise _unusable(name, "a number as nested_offset", repr(said)[:200])
        return _State((shape[0], shape[1]), offset)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        whole = self.encoded((source.whole_codes, *source.others))
        assert whole.scale is not None, "as it was encoded"
        return EncodedWeight(self, whole.codes[start:stop], whole.scale[start:stop])

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        table = torch.tensor(_TABLES[self.numbers], device=codes.device)
        wide = _finite(scale).repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
        return (table[codes.int()] * wide).to(dtype)


def _finite(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32 (ValueError for those that are not finite)."""
    factors = scale.float()
    if not factors.isfinite().all():
        raise ValueError("scale: expected finite numbers")
    return factors


def _unusable(name: str, expected: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} is not the state of this weight", expected=expected, found=found
    )


def _shown(numbers: torch.Tensor) -> str:
    return ", ".join(f"{one:.4f}" for one in numbers.tolist())
