"""Checks of the quantization kernels' arguments; errors say what was expected and found."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mtp_kernels.quantize.layouts import (
    BLOCK,
    GROUP_SIZES,
    W4AFP8_GROUP,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    RowStats,
    W4AFp8,
)

if TYPE_CHECKING:
    import torch

# Names of torch's dtypes: whoever converts arrays alone does without torch.
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
BLOCK_SCALE_DTYPES = (*FLOAT_DTYPES, "float8_e8m0fnu")


def check_matrix(what: str, tensor: object, dtypes: tuple[str, ...]) -> torch.Tensor:
    """Return the tensor, contiguous, if it is a non-empty matrix of one of the dtypes."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, found {type(tensor).__name__}")
    if str(tensor.dtype).removeprefix("torch.") not in dtypes:
        expected = " or ".join(f"torch.{dtype}" for dtype in dtypes)
        raise TypeError(f"{what}: expected dtype {expected}, found {tensor.dtype}")
    if tensor.ndim != 2 or tensor.numel() == 0:
        raise ValueError(f"{what}: expected a non-empty matrix, found shape {list(tensor.shape)}")
    return tensor.detach().contiguous()


def check_floats(what: str, tensor: object) -> torch.Tensor:
    """Return a matrix of floats as backends take them: of half precision in fp32, which holds it
    exactly."""
    import torch

    values = check_matrix(what, tensor, FLOAT_DTYPES)
    return values.float() if values.dtype == torch.float16 else values


def check_fp8_block(source: Fp8Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and fp32 block scales of a source whose scales describe its codes."""
    codes = check_matrix("fp8 codes", source.codes, ("float8_e4m3fn",))
    scale = check_matrix("fp8 block scale", source.scale, BLOCK_SCALE_DTYPES).float()
    _check_same_device(codes, scale)
    expected = [-(-size // BLOCK) for size in codes.shape]
    if list(scale.shape) != expected:
        raise ValueError(
            f"fp8 block scale: expected shape {expected} for codes {list(codes.shape)}, "
            f"found {list(scale.shape)}"
        )
    low, high = (float(bound) for bound in scale.aminmax())
    if not 0 < low <= high < math.inf:  # of NaN nothing is true
        _refuse(~scale.isfinite() | (scale < 0), scale, "fp8 block scale", "finite, at least 0")
        _check_zero_scales(codes, scale)
    return codes, scale


def check_fp8_channel(weight: Fp8Channel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and fp32 scales [N, 1] of a weight whose scales describe its codes."""
    codes = check_matrix("fp8 codes", weight.codes, ("float8_e4m3fn",))
    scale = weight.scale.float()
    if scale.shape != (codes.shape[0], 1):
        raise ValueError(
            f"channel scale: expected {[codes.shape[0], 1]}, found {list(scale.shape)}"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError("channel scale: expected finite numbers above 0")
    return codes, scale


def check_source(source: torch.Tensor | Fp8Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a source's values in bf16 or fp32, or its codes and fp32 block scales if it is fp8."""
    if isinstance(source, Fp8Block):
        return check_fp8_block(source)
    return check_floats("source", source), None


def check_group_size(columns: int, group_size: int) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group size: expected one of {GROUP_SIZES}, found {group_size}")
    if columns % group_size:
        raise ValueError(f"int4: K = {columns} is not divisible by the group size {group_size}")


def output_dtype(wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of dequantized weights: bfloat16 unless another is wanted."""
    import torch

    dtype = torch.bfloat16 if wanted is None else wanted
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"output dtype: expected bfloat16 or float32, found {dtype}")
    return dtype


def check_packed(weight: Int8Channel | Int4Group | W4AFp8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of a weight's codes, and its fp32 scales if they describe them."""
    import torch

    scale_dtype = "float32" if isinstance(weight, W4AFp8) else "bfloat16"
    packed_dtype = "int8" if isinstance(weight, W4AFp8) else "int32"
    packed = check_matrix("packed", weight.packed, (packed_dtype,))
    codes = packed.view(torch.uint8)
    columns = 2 * codes.shape[1]
    groups: tuple[int, ...] = (1,)
    if isinstance(weight, W4AFp8):
        check_group_size(columns, W4AFP8_GROUP)
        groups = (columns // W4AFP8_GROUP,)
    elif isinstance(weight, Int4Group):
        groups = tuple(columns // size for size in GROUP_SIZES if columns % size == 0)
    return codes, _check_scale(packed, weight.scale, scale_dtype, groups)


def _check_scale(
    packed: torch.Tensor, scale: torch.Tensor, dtype: str, groups: tuple[int, ...]
) -> torch.Tensor:
    """Return the fp32 scales of a packed weight, if there is one of these numbers per row."""
    scale = check_matrix("scale", scale, (dtype,)).float()
    _check_same_device(packed, scale)
    if scale.shape[0] != packed.shape[0] or scale.shape[1] not in groups:
        raise ValueError(
            f"scale: expected {packed.shape[0]} rows and {' or '.join(map(str, groups))} columns "
            f"for packed {list(packed.shape)}, found {list(scale.shape)}"
        )
    _refuse(~scale.isfinite() | (scale <= 0), scale, "scale", "finite, above 0")
    return scale


def check_finite(source: torch.Tensor, stats: RowStats) -> None:
    """Refuse a source with NaN or infinite weights, which show in its energies."""
    low, high = (float(bound) for bound in (stats.signal + stats.error).aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return
    import torch

    if source.dtype == torch.float8_e4m3fn:
        check_e4m3(source)
    _refuse(~source.float().isfinite(), source, "source", "finite weights")
    row = int((~stats.error.isfinite()).nonzero()[0])
    raise ValueError(f"source: the weights of row {row} are too large for the quantized format")


def check_e4m3(codes: torch.Tensor) -> None:
    """Refuse e4m3 codes that are no numbers."""
    import torch

    bits = codes.view(torch.uint8)
    _refuse((bits & 0x7F) == 0x7F, bits, "source", "finite e4m3 codes")


def _check_same_device(values: torch.Tensor, scale: torch.Tensor) -> None:
    if values.device != scale.device:
        raise ValueError(f"scale: expected on {values.device}, found on {scale.device}")


def _check_zero_scales(codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse zero scales over codes that are not zero."""
    import torch

    for block_row, block_column in (scale == 0).nonzero().tolist():
        rows = slice(block_row * BLOCK, (block_row + 1) * BLOCK)
        columns = slice(block_column * BLOCK, (block_column + 1) * BLOCK)
        if (codes[rows, columns].view(torch.uint8) & 0x7F).any():
            raise ValueError(
                f"fp8 block scale: expected above 0 where codes are not zero, "
                f"found 0 at block ({block_row}, {block_column})"
            )


def _refuse(wrong: torch.Tensor, values: torch.Tensor, what: str, expected: str) -> None:
    positions = wrong.nonzero()
    if not len(positions):
        return
    row, column = positions[0].tolist()
    raise ValueError(
        f"{what}: expected {expected}, found {values[row, column].item()} "
        f"at row {row}, column {column} ({len(positions)} such in all)"
    )
