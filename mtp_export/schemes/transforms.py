"""Transforms a plan may name: each reads its inputs in pieces, hands on its outputs' bytes, and
says what was lost on the way.

A piece's size depends on the tensor alone, and errors are added up piece by piece: whatever the
workers, the memory or the device, the bytes and the figures are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_export.bundle.run import Facts, Sink, Transform
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import OutputTensor
from mtp_export.checkpoint.tensor_reader import TensorReader
from mtp_export.errors import InvalidInputError
from mtp_export.schemes.storage import BLOCK, DEQUANTIZE, QUANTIZE, TRANSPOSE, Storage

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block

_PIECE_ELEMENTS = 1 << 20
_STRIP_BYTES = 4 << 20  # of a matrix that is being transposed


@dataclass(frozen=True)
class Numerics:
    """How a run computes: the rule that chooses int4 scales, and the torch device."""

    scale_rule: str = "minmax"
    device: str = "cpu"


def transforms(numerics: Numerics) -> dict[str, Transform]:
    """Every transform by the name that a step gives it."""
    kernels: dict[str, _Kernel] = {
        DEQUANTIZE: _dequantize,
        QUANTIZE[Storage.FP8_BLOCK]: _quantize_fp8,
        QUANTIZE[Storage.INT8_CHANNEL]: _quantize_int8,
        QUANTIZE[Storage.INT4_GROUP]: _quantize_int4,
        QUANTIZE[Storage.W4AFP8]: _quantize_w4afp8,
    }
    streamed = {name: _streamed(kernel, numerics) for name, kernel in kernels.items()}
    return {**streamed, TRANSPOSE: _transpose}


# A piece of a weight in, the same rows of the first outputs and the error out.
_Kernel = Callable[
    [Any, "Sequence[OutputTensor]", Numerics], "tuple[tuple[torch.Tensor, ...], ErrorStats]"
]


def _dequantize(
    source: Fp8Block, outputs: Sequence[OutputTensor], numerics: Numerics
) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
    import torch

    from mtp_kernels.quantize import dequantize_fp8_block

    weights, error = dequantize_fp8_block(source, torch.bfloat16)
    return (weights,), error


def _quantize_fp8(
    source: torch.Tensor, outputs: Sequence[OutputTensor], numerics: Numerics
) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
    from mtp_kernels.quantize import quantize_fp8_block

    result, error = quantize_fp8_block(source)
    return (result.codes, result.scale), error


def _quantize_int8(
    source: torch.Tensor | Fp8Block, outputs: Sequence[OutputTensor], numerics: Numerics
) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
    from mtp_kernels.quantize import quantize_int8_channel

    result, error = quantize_int8_channel(source)
    return (result.packed, result.scale), error


def _quantize_int4(
    source: torch.Tensor | Fp8Block, outputs: Sequence[OutputTensor], numerics: Numerics
) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
    from mtp_kernels.quantize import quantize_int4_group

    packed, scale = outputs[0].shape, outputs[1].shape
    result, error = quantize_int4_group(
        source, group_size=8 * packed[1] // scale[1], scale_rule=numerics.scale_rule
    )
    return (result.packed, result.scale), error


def _quantize_w4afp8(
    source: torch.Tensor | Fp8Block, outputs: Sequence[OutputTensor], numerics: Numerics
) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
    from mtp_kernels.quantize import quantize_w4afp8

    result, error = quantize_w4afp8(source, scale_rule=numerics.scale_rule)
    return (result.packed, result.scale), error


def _streamed(kernel: _Kernel, numerics: Numerics) -> Transform:
    """A kernel as a transform: over pieces of whole fp8 blocks."""

    def transform(
        inputs: Sequence[TensorInfo],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        budget_bytes: int,
    ) -> Facts:
        errors: list[ErrorStats] = []
        with ExitStack() as opened:
            readers = [opened.enter_context(TensorReader(one, once=True)) for one in inputs]
            for start, stop in _pieces(inputs[0]):
                source = _read(readers, start, stop, numerics.device)
                try:
                    results, error = kernel(source, outputs, numerics)
                except ValueError as problem:
                    raise _damaged(inputs[0], start, stop, problem) from problem
                errors.append(error)
                for number, result in enumerate(results):
                    sink(number, _bytes_of(result.cpu()))
        for number in range(len(results), len(outputs)):
            sink(number, _bytes_of(_constant(outputs[number], inputs[0])))
        return _quality(errors)

    return transform


def _pieces(weight: TensorInfo) -> Iterator[tuple[int, int]]:
    rows, columns = weight.shape
    step = max(1, _PIECE_ELEMENTS // (BLOCK * columns)) * BLOCK
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _read(readers: Sequence[TensorReader], start: int, stop: int, device: str) -> Any:
    """Rows of a weight on a device: a tensor, or an Fp8Block when the step has its scale."""
    from mtp_kernels.quantize import Fp8Block

    values = readers[0].rows(start, stop).to(device)
    if len(readers) == 1:
        return values
    scale = readers[1].rows(start // BLOCK, -(-stop // BLOCK)).to(device)
    return Fp8Block(values, scale)


def _constant(output: OutputTensor, weight: TensorInfo) -> torch.Tensor:
    """Outputs that no weight decides: the weight's shape, and an activation scale of 1."""
    import torch

    if output.dtype == "I64":
        return torch.tensor(weight.shape, dtype=torch.int64)
    return torch.ones(output.shape, dtype=torch.float32)


def _quality(errors: Sequence[ErrorStats]) -> Mapping[str, Any]:
    """SQNR of a whole tensor in dB, null where nothing was lost, and its largest error."""
    signal = math.fsum(error.signal_energy for error in errors)
    noise = math.fsum(error.error_energy for error in errors)
    return {
        "sqnr_db": 10 * math.log10(signal / noise) if signal and noise else None,
        "max_error": max(error.max_error for error in errors),
    }


def _damaged(weight: TensorInfo, start: int, stop: int, problem: ValueError) -> InvalidInputError:
    return InvalidInputError(
        f"Tensor {weight.name} cannot be converted (rows {start} to {stop - 1})",
        where=weight.path,
        found=str(problem),
        todo="The weight or its scale is damaged: get the checkpoint again",
    )


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Workers are the parallelism: small torch operations only lose by threads of their own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _transpose(
    inputs: Sequence[TensorInfo], outputs: Sequence[OutputTensor], sink: Sink, budget_bytes: int
) -> Facts:
    """Output rows in panels as large as the budget: a tensor that fits it is read once, a larger
    one once a panel."""
    import torch

    (tensor,) = inputs
    rows, columns = tensor.shape
    element_bytes = tensor.size_bytes // (rows * columns)
    dtype = _integer_dtype(element_bytes)
    strip_bytes = min(_STRIP_BYTES, budget_bytes // 6)  # of which there are three at a time
    step = max(1, min(rows, strip_bytes // (columns * element_bytes)))
    most = max(1, (budget_bytes - 3 * strip_bytes) // (rows * element_bytes))
    panel_columns = -(-columns // -(-columns // most))  # as few panels as that, of equal width
    with TensorReader(tensor) as reader:
        for first in range(0, columns, panel_columns):
            last = min(first + panel_columns, columns)
            panel = torch.empty(last - first, rows, dtype=dtype)
            for row in range(0, rows, step):
                strip = reader.rows(row, min(row + step, rows)).view(dtype)[:, first:last]
                panel[:, row : row + step] = strip.contiguous().t().contiguous()
            height = max(1, strip_bytes // (rows * element_bytes))
            for start in range(0, last - first, height):
                sink(0, _bytes_of(panel[start : start + height]))
            del panel  # before the next one is made
    return {}


def _integer_dtype(element_bytes: int) -> torch.dtype:
    """An integer dtype of the same width, which every torch operation supports."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element_bytes]
