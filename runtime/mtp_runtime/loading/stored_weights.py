"""One weight out of the tensors that store it, for every form on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mtp_export.errors import InvalidInputError
from mtp_export.schemes.storage import Storage
from mtp_export.schemes.stored import StoredWeight
from mtp_kernels import quantize
from mtp_runtime.layers.linear import Dense, Fp8Block, Int4Group, Int8Channel, W4AFp8, Weight

Tensors = Sequence[torch.Tensor]


def assembled(one: StoredWeight, tensors: Tensors) -> Weight:
    """The weight [out, in] that a folder's tensors hold, in the order of one.tensors.

    Raises InvalidInputError for tensors that contradict each other.
    """
    if one.transposed:
        tensors = [tensor.t().contiguous() if tensor.dim() == 2 else tensor for tensor in tensors]
    if one.storage is Storage.BF16:
        return Dense(tensors[0])
    return _BUILDERS[one.storage](one, tensors)


def _fp8(one: StoredWeight, tensors: Tensors) -> Weight:
    return Fp8Block(quantize.Fp8Block(*tensors))


def _int8(one: StoredWeight, tensors: Tensors) -> Weight:
    return Int8Channel(quantize.Int8Channel(*_packed(one, tensors)))


def _int4(one: StoredWeight, tensors: Tensors) -> Weight:
    return Int4Group(quantize.Int4Group(*_packed(one, tensors)))


def _packed(one: StoredWeight, tensors: Tensors) -> Tensors:
    """Codes and scale; what weight_shape says must be what the config says."""
    *packed, shape = tensors
    if tuple(shape.tolist()) != one.weight.shape:
        raise InvalidInputError(
            f"Tensor {one.tensors[2].name} contradicts config.json",
            expected=list(one.weight.shape),
            found=shape.tolist(),
        )
    return packed


def _w4afp8(one: StoredWeight, tensors: Tensors) -> Weight:
    """The input scale belongs to fp8 activations, which the runtime does not compute with."""
    codes, scale, input_scale = tensors
    if not (input_scale.isfinite() & (input_scale > 0)).all():
        raise InvalidInputError(
            f"Tensor {one.tensors[2].name} is no scale",
            expected="a finite number above 0",
            found=input_scale.tolist(),
        )
    return W4AFp8(quantize.W4AFp8(codes, scale))


_BUILDERS: dict[Storage, Callable[[StoredWeight, Tensors], Weight]] = {
    Storage.FP8_BLOCK: _fp8,
    Storage.INT8_CHANNEL: _int8,
    Storage.INT4_GROUP: _int4,
    Storage.W4AFP8: _w4afp8,
}
