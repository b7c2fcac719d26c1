"""Blocks of ggml, llama.cpp's library: their names, sizes and conversions of rows in main memory.

A row of K elements is K / elements blocks, each of codes and of the scale in front of or behind
them, bytes one after the other. Encoders give the bits of the package `gguf`, whose quantizers are
those of `ggml/src/ggml-quants.c`, and of K-quants those of llama-quantize without an importance
matrix; decoders compute in its order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.quantize import ggml_decoded, ggml_encoded, ggml_vectors
from mtp_kernels.quantize.ggml_k_encoded import encode_k_rows
from mtp_kernels.quantize.ggml_vectors import SIZE
from mtp_kernels.quantize.layouts import OutOfRangeError


class GgmlBlock(NamedTuple):
    """A kind of blocks: its number among the kernels, elements and bytes of a block."""

    number: int
    elements: int
    bytes: int


GGML_BLOCKS: dict[str, GgmlBlock] = {
    "q8_0": GgmlBlock(ggml_vectors.Q8_0, 32, 34),
    "q4_0": GgmlBlock(ggml_vectors.Q4_0, 32, 18),
    "q4_1": GgmlBlock(ggml_vectors.Q4_1, 32, 20),
    "q5_0": GgmlBlock(ggml_vectors.Q5_0, 32, 22),
    "q5_1": GgmlBlock(ggml_vectors.Q5_1, 32, 24),
    "mxfp4": GgmlBlock(ggml_vectors.MXFP4, 32, 17),
    "q4_k": GgmlBlock(ggml_decoded.Q4_K, 256, 144),
    "q5_k": GgmlBlock(ggml_decoded.Q5_K, 256, 176),
    "q6_k": GgmlBlock(ggml_decoded.Q6_K, 256, 210),
}


_NO_BLOCK_SCALE = np.empty((0, 0), np.float32)


def encoded_blocks(kind: str, values: Any) -> Any:
    """Return blocks uint8 [N, bytes of a row] of fp32 weights [N, K], all of them finite.

    Raises OutOfRangeError for a block whose scale is beyond half precision.
    """
    packed, (_, error, _) = quantize_ggml_blocks(kind, values, _NO_BLOCK_SCALE)
    if not np.isfinite(error).all():
        raise OutOfRangeError(
            f"{kind}: expected weights whose scales half precision holds, found magnitudes up to"
            f" {np.abs(values).max():.3g}"
        )
    return packed


def quantize_ggml_blocks(kind: str, source: Any, block_scale: Any) -> tuple[Any, Any]:
    """Return blocks uint8 [N, bytes of a row], and energies and errors of the rows, as arrays, of
    the rows that cpu_rows loads; the scale of a block beyond half precision is infinite."""
    block = GGML_BLOCKS[kind]
    rows, columns = source.shape
    packed = np.empty((rows, columns // block.elements * block.bytes), np.uint8)
    stats = np.empty(rows), np.empty(rows), np.empty(rows, np.float32)
    encode = ggml_encoded.encode_rows if block.elements == SIZE else encode_k_rows
    encode(block.number, source, block_scale, packed, *stats)
    return packed, stats


def dequantize_ggml_blocks(kind: str, packed: Any) -> Any:
    """Return weights fp32 [N, K] of blocks uint8 [N, bytes of a row].

    Raises ValueError for scales that are not finite.
    """
    block = GGML_BLOCKS[kind]
    rows, row_bytes = packed.shape
    weights = np.empty((rows, row_bytes // block.bytes * block.elements), np.float32)
    if not ggml_decoded.decode_rows(block.number, packed, block.bytes, weights):
        raise ValueError(f"{kind}: expected finite scales, found NaN or infinite ones")
    return weights
