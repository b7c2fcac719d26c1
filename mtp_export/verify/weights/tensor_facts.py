"""Statistics of a weight's values and codes, from one pass over it, without any reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from mtp_export.progress import ProgressCallback
from mtp_export.schemes.formats import EncodedWeight
from mtp_export.schemes.storage import BLOCK, INTEGERS, Storage
from mtp_export.schemes.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import weights as causes

if TYPE_CHECKING:
    import torch

_E4M3_MAX = 448.0


@dataclass(frozen=True)
class TensorFacts:
    """Statistics of one weight.

    error: why the values cannot be decoded (a NaN code, a negative scale), else "". digest: of the
    stored codes. constant: all values are equal. outer_share: share of codes in the outer halves of
    their range, None for other than integer codes. blocks, full_blocks: fp8 blocks that are not all
    zero, and those that reach the largest code. power_of_two_scales: every fp8 scale is one.
    """

    weight: WeightOnDisk
    error: str = ""
    digest: str = ""
    constant: bool = False
    rms: float = 0.0
    outer_share: float | None = None
    blocks: int = 0
    full_blocks: int = 0
    power_of_two_scales: bool = False


def facts_of(weight: WeightOnDisk, progress: ProgressCallback) -> TensorFacts:
    """Read a weight once, piece by piece, and return its statistics."""
    import torch

    digest, squares, elements = xxhash.xxh3_128(), 0.0, 0
    low, high = math.inf, -math.inf
    outer = blocks = full = 0
    powers = True
    for start, stop in weight.pieces():
        raw = weight.encoded(start, stop)
        digest.update(_bytes(raw.codes))
        try:
            values = raw.dequantize()
        except ValueError as error:
            return TensorFacts(weight, causes.not_decodable(start, stop - 1, error))
        if not torch.isfinite(values).all():
            wrong = int((~torch.isfinite(values)).sum())
            return TensorFacts(weight, causes.not_finite(wrong, start))
        squares += float(values.double().square().sum())
        elements += values.numel()
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        outer += _outer_codes(raw)
        if raw.storage is Storage.FP8_BLOCK and raw.scale is not None:
            some, those = _blocks(raw.codes)
            blocks, full = blocks + some, full + those
            powers = powers and bool((torch.frexp(raw.scale.float())[0] == 0.5).all())
        progress(sum(t.size_bytes for t in weight.tensors) * (stop - start) // weight.rows)
    integer = weight.stored.storage in (*INTEGERS, Storage.W4AFP8)
    return TensorFacts(
        weight,
        digest=str(digest.hexdigest()),
        constant=low == high and elements > 1,
        rms=math.sqrt(squares / max(1, elements)),
        outer_share=outer / max(1, elements) if integer else None,
        blocks=blocks,
        full_blocks=full,
        power_of_two_scales=powers and blocks > 0,
    )


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _outer_codes(raw: EncodedWeight) -> int:
    """Number of integer codes in the lower or upper quarter of their range."""
    import torch

    if raw.storage is Storage.INT8_CHANNEL:
        codes = raw.codes.contiguous().view(torch.uint8).to(torch.int16) - 128
        return int((codes.abs() >= 64).sum())
    if raw.storage not in (Storage.INT4_GROUP, Storage.W4AFP8):
        return 0
    packed = raw.codes.contiguous().view(torch.uint8)
    total = 0
    for nibbles in (packed & 0xF, packed >> 4):
        if raw.storage is Storage.W4AFP8:
            nibbles = nibbles ^ 8
        total += int(((nibbles < 4) | (nibbles > 12)).sum())
    return total


def _blocks(codes: torch.Tensor) -> tuple[int, int]:
    """Count of 128 x 128 blocks that are not all zero, and of those that reach the largest code."""
    import torch
    import torch.nn.functional as F

    rows, columns = codes.shape
    values = codes.to(torch.float32).abs()
    padded = F.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tops = padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).amax((1, 3))
    return int((tops > 0).sum()), int((tops == _E4M3_MAX).sum())
