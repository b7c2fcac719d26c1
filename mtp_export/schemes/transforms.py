"""Transforms a plan may name: each reads its inputs in pieces and hands on its outputs' bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import OutputTensor, Step
from mtp_export.checkpoint.reader import read_rows
from mtp_export.checkpoint.run import Sink, Transform
from mtp_export.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

DEQUANTIZE = "dequantize_fp8_block"
TRANSPOSE = "transpose"
_BLOCK_ROWS = 128
# Reading, dequantizing to bf16 and handing on hold about this many bytes per fp8 code at once.
_BYTES_PER_CODE = 8


def dequantize_step(weight: TensorInfo, scale: TensorInfo, name: str) -> Step:
    """An fp8 weight and its block scales as one bf16 tensor."""
    output = OutputTensor(name, "BF16", weight.shape)
    return Step(DEQUANTIZE, (weight.name, scale.name), (output,))


def transpose_step(tensor: TensorInfo, name: str) -> Step:
    """A matrix [n, k] as [k, n], its elements unchanged."""
    n, k = tensor.shape
    return Step(TRANSPOSE, (tensor.name,), (OutputTensor(name, tensor.dtype, (k, n)),))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _dequantize(
    inputs: Sequence[TensorInfo], outputs: Sequence[OutputTensor], sink: Sink, budget_bytes: int
) -> None:
    import torch
    from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block

    weight, scale = inputs
    rows, columns = weight.shape
    blocks = max(1, budget_bytes // (_BLOCK_ROWS * columns * _BYTES_PER_CODE))
    step_rows = blocks * _BLOCK_ROWS
    for start in range(0, rows, step_rows):
        stop = min(start + step_rows, rows)
        codes = read_rows(weight, start, stop)
        scales = read_rows(scale, start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS))
        try:
            result, _ = dequantize_fp8_block(Fp8Block(codes, scales), torch.bfloat16)
        except ValueError as error:
            raise InvalidInputError(
                f"Tensor {weight.name} cannot be dequantized (rows {start} to {stop - 1})",
                where=weight.path,
                found=str(error),
                todo="The weight or its scale is damaged: get the checkpoint again",
            ) from error
        sink(0, _bytes_of(result))


def _transpose(
    inputs: Sequence[TensorInfo], outputs: Sequence[OutputTensor], sink: Sink, budget_bytes: int
) -> None:
    """Output rows in panels that fit the budget; a large tensor is read once a panel."""
    import torch

    (tensor,) = inputs
    rows, columns = tensor.shape
    element_bytes = tensor.size_bytes // (rows * columns)
    panel_columns = max(1, min(columns, budget_bytes // (3 * rows * element_bytes)))
    read_step = max(1, min(rows, budget_bytes // (3 * columns * element_bytes)))
    for first in range(0, columns, panel_columns):
        last = min(first + panel_columns, columns)
        strips = [
            read_rows(tensor, row, min(row + read_step, rows))[:, first:last].clone()
            for row in range(0, rows, read_step)
        ]
        raw = torch.cat([strip.view(_integer_dtype(element_bytes)) for strip in strips])
        sink(0, _bytes_of(raw.t()))


def _integer_dtype(element_bytes: int) -> torch.dtype:
    """An integer dtype of the same width, which every torch operation supports."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element_bytes]


TRANSFORMS: dict[str, Transform] = {DEQUANTIZE: _dequantize, TRANSPOSE: _transpose}
