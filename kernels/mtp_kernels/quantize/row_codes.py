"""Rows of quantized weights in one form, whatever layout they are stored in: codes that are numbers
themselves, and float32 scales of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.quantize import checks
from mtp_kernels.quantize.block_floats import e2m1_values, pack_pairs, unpack_pairs
from mtp_kernels.quantize.layouts import (
    BLOCK,
    SIGN_BITS,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    QuantizedWeight,
    W4AFp8,
)

_CODES_OF = {torch.int32: 8, torch.uint8: 2}  # an element of these dtypes; others are one
_NIBBLE_BITS = 4
_BYTE_SIGN = 0x80  # code + 128 and the two's complement differ in a byte's sign


@dataclass(frozen=True)
class RowCodes:
    """Rows [n, K] of a matrix: a number is its code times its row's scale for its group of columns,
    plus its row's minimum for the group where there are minimums.

    codes: int8 or float8_e4m3fn [n, K], or of 4 bits, the first in the lowest bits, whole numbers
    int32 [n, K/8] or e2m1 uint8 [n, K/2]. Integers are two's complements once the bits of `flip`
    are turned over in every byte. scale and minimum float32 [n, ceil(K/group)].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    group: int
    flip: int = 0
    minimum: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> RowCodes:
        minimum = None if self.minimum is None else self.minimum[rows]
        return RowCodes(self.codes[rows], self.scale[rows], self.group, self.flip, minimum)

    @property
    def columns(self) -> int:
        """The columns of the matrix."""
        return self.codes.shape[1] * _CODES_OF.get(self.codes.dtype, 1)

    @property
    def of_groups(self) -> torch.Tensor:
        """Minimums, where there are some, and scales of all groups [n, ceil(K/group), 1 or 2]."""
        parts = [self.scale] if self.minimum is None else [self.minimum, self.scale]
        return torch.stack(parts, dim=-1)

    def numbers(self) -> torch.Tensor:
        """Return the codes [n, K] as int8 or float8_e4m3fn, each the number that it stands for."""
        codes = self.codes
        if codes.dtype is torch.uint8:
            return e2m1_values(unpack_pairs(codes)).to(torch.float8_e4m3fn)
        if self.flip:
            codes = (codes.contiguous().view(torch.uint8) ^ self.flip).view(codes.dtype)
        if codes.dtype is torch.int32:
            nibbles = [codes << (28 - 4 * code) >> 28 for code in range(_CODES_OF[codes.dtype])]
            codes = torch.stack(nibbles, dim=-1).flatten(1).to(torch.int8)
        return codes

    def values(self) -> torch.Tensor:
        """Return the numbers [n, K] in float32."""
        found = self.numbers().float() * self._spread(self.scale)
        return found if self.minimum is None else found + self._spread(self.minimum)

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, dim=1)[:, : self.columns]


def integer_rows(numbers: torch.Tensor, scale: torch.Tensor, bits: int) -> RowCodes:
    """Return int8 or int16 numbers [n, K] times the scales [n, G] of their groups as codes of 4 or
    8 bits above a minimum; those of a group differ by less than 2^bits.

    Raises ValueError for scales that are not finite.
    """
    factors, half = scale.float(), 1 << (bits - 1)
    if not factors.isfinite().all():
        raise ValueError("group scale: expected finite numbers")
    groups = numbers.reshape(*scale.shape, -1)
    middle = groups.amin(dim=-1, keepdim=True) + half
    codes = (groups - middle).flatten(1).to(torch.int8)
    if bits == _NIBBLE_BITS:
        codes = pack_pairs((codes & 15).view(torch.uint8)).view(torch.int32)
    return RowCodes(codes, factors, groups.shape[-1], minimum=middle[..., 0].float() * factors)


def row_codes(weight: QuantizedWeight) -> RowCodes:
    """Return a stored weight as rows of codes (ValueError for damaged codes or scales)."""
    match weight:
        case Fp8Block():
            codes, scale = checks.check_fp8_block(weight)
            checks.check_e4m3(codes)
            rows = scale.repeat_interleave(BLOCK, dim=0)[: len(codes)]
            return RowCodes(codes, rows, BLOCK)
        case Fp8Channel():
            codes, scale = checks.check_fp8_channel(weight)
            checks.check_e4m3(codes)
            return RowCodes(codes, scale, codes.shape[1])
        case Int8Channel():
            packed, scale = checks.check_packed(weight)
            return RowCodes(packed.view(torch.int8), scale, packed.shape[1], _BYTE_SIGN)
        case Int4Group() | W4AFp8():
            packed, scale = checks.check_packed(weight)
            group = 2 * packed.shape[1] // scale.shape[1]
            flip = SIGN_BITS & 0xFF if isinstance(weight, Int4Group) else 0
            return RowCodes(packed.view(torch.int32), scale, group, flip)
