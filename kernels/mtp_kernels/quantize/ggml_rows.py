"""Blocks of ggml as rows of codes with a float32 scale per group, and a minimum where they have
some."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtp_kernels.quantize.block_floats import e8m0_values, pack_pairs
from mtp_kernels.quantize.ggml_blocks import GGML_BLOCKS
from mtp_kernels.quantize.layouts import SIGN_BITS
from mtp_kernels.quantize.row_codes import RowCodes

# Codes of the elements of blocks, scales of their groups and, where there are some, minimums.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

_BITS = torch.arange(8, dtype=torch.uint8)


def ggml_row_codes(kind: str, packed: torch.Tensor) -> RowCodes:
    """Return blocks uint8 [N, bytes of a row] as rows of codes.

    The values are those of dequantize_ggml_blocks, but for rounding where there are minimums.
    Raises ValueError for scales that are not finite.
    """
    codes, scale, minimum = PARTS[kind](packed.view(len(packed), -1, GGML_BLOCKS[kind].bytes))
    if not all(part.isfinite().all() for part in (scale, minimum) if part is not None):
        raise ValueError(f"{kind}: expected finite scales, found NaN or infinite ones")
    codes, scale = codes.flatten(1), scale.flatten(1)
    group, flip = codes.shape[1] // scale.shape[1], 0
    if codes.dtype is torch.uint8:  # of four bits
        codes = pack_pairs(codes)
        if kind != "mxfp4":
            codes, flip = codes.view(torch.int32), SIGN_BITS & 0xFF
    if minimum is not None:
        minimum = minimum.flatten(1) + 8 * scale if flip else minimum.flatten(1)
    return RowCodes(codes, scale, group, flip, minimum)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the numbers in half precision at a byte of blocks."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the codes of bytes, `size` low nibbles before as many high ones."""
    parts = blocks.reshape(*blocks.shape[:-1], -1, size)
    return torch.cat([parts & 15, parts >> 4], dim=-1).flatten(-2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _five_bits(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return codes whose fifth bits begin at a byte."""
    fifth = blocks[..., first : first + 4, None] >> _BITS & 1
    return (_nibbles(blocks[..., first + 4 :], 16) | fifth.flatten(-2) << 4).view(torch.int8)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _five_bits(blocks, 2) - 16, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _five_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 1:], 16), e8m0_values(blocks[..., :1]), None


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the eight groups of a K-quant: each of six bits, those of the last four
    in two parts, times those of the block."""
    scales, least, rest = (blocks[..., at : at + 4] for at in (4, 8, 12))
    steps = torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], dim=-1)
    below = torch.cat([least & 63, rest >> 4 | least >> 6 << 4], dim=-1)
    return _half(blocks, 0) * steps, -(_half(blocks, 2) * below)


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 16:], 32), *_scales_and_minimums(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    fifth = (blocks[..., None, 16:48] >> _BITS[:, None] & 1).flatten(-2)
    codes = _nibbles(blocks[..., 48:], 32) | fifth << 4
    return codes.view(torch.int8), *_scales_and_minimums(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    halves = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = halves >> 2 * _BITS[:4, None] & 3
    codes = (_nibbles(blocks[..., :128], 64) | high.flatten(-3) << 4).view(torch.int8) - 32
    return codes, _half(blocks, 208) * blocks[..., 192:208].view(torch.int8), None


PARTS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "mxfp4": _mxfp4,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
