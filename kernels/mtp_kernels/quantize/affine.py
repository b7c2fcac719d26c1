"""Codes of MLX's affine groups: a stream of bits along a row, each code from its lowest bit on."""

from __future__ import annotations

import torch

_BYTE_BITS = 8


def dequantized_affine(
    words: torch.Tensor, bits: int, scales: torch.Tensor, biases: torch.Tensor
) -> torch.Tensor:
    """Return code * scale + bias [n, K] in float32, of words of 32 bits [n, K * bits / 32] and
    the scales and biases [n, groups] of equal groups of a row."""
    codes = _unpacked(words, bits).float()
    size = codes.shape[1] // scales.shape[1]
    factors, offsets = (one.float().repeat_interleave(size, dim=1) for one in (scales, biases))
    return codes * factors + offsets


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes [n, K] of words of 32 bits [n, K * bits / 32]: eight of them fill `bits`
    bytes."""
    lanes = words.view(torch.uint8).view(len(words), -1, bits).int()
    after = torch.nn.functional.pad(lanes[..., 1:], (0, 1))
    starts = range(0, _BYTE_BITS * bits, bits)
    codes = [
        (lanes[..., at // _BYTE_BITS] | after[..., at // _BYTE_BITS] << _BYTE_BITS)
        >> at % _BYTE_BITS
        for at in starts
    ]
    return (torch.stack(codes, dim=-1) & ((1 << bits) - 1)).flatten(1)
