"""Blocks of ggml with a scale each, as rows of codes with a float32 scale per block."""

from __future__ import annotations

import torch

from mtp_kernels.quantize.block_floats import e8m0_values
from mtp_kernels.quantize.ggml_blocks import GGML_BLOCKS
from mtp_kernels.quantize.layouts import SIGN_BITS
from mtp_kernels.quantize.row_codes import RowCodes


def ggml_row_codes(kind: str, packed: torch.Tensor) -> RowCodes:
    """Return blocks uint8 [N, bytes of a row] of q8_0, q4_0 or mxfp4 as rows of codes.

    The values are those of dequantize_ggml_blocks. Raises ValueError for scales that are not
    finite.
    """
    block = GGML_BLOCKS[kind]
    blocks = packed.view(len(packed), -1, block.bytes)
    if kind == "mxfp4":
        scale, codes = e8m0_values(blocks[..., 0]), blocks[..., 1:]
    else:
        scale, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    scale = scale.float()
    if not scale.isfinite().all():
        raise ValueError(f"{kind}: expected finite scales, found NaN or infinite ones")
    if kind == "q8_0":
        return RowCodes(codes.flatten(1).view(torch.int8), scale, block.elements)
    # The low nibbles of a block are its first half: pairs of neighbours become bytes.
    halves = (codes & 15, codes >> 4)
    pairs = torch.cat([half[..., ::2] | half[..., 1::2] << 4 for half in halves], dim=-1).flatten(1)
    if kind == "mxfp4":
        return RowCodes(pairs, scale, block.elements)
    return RowCodes(pairs.view(torch.int32), scale, block.elements, SIGN_BITS & 0xFF)
