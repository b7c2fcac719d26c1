"""Compiled CPU backend: one pass over codes that stay in cache, without the GIL.

A call uses one thread; callers run several weights at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtp_kernels.weight_statistics import cpu_loops
from mtp_kernels.weight_statistics.figures import CodeGroups, Difference

# numpy has neither bf16 nor fp8, and numba no f16: the loops see bits, of which the dtype says what
# they stand for.
_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
}


def float_group(values: torch.Tensor) -> CodeGroups:
    low, high, square_sum = cpu_loops.float_group(_array(values))
    return CodeGroups(
        torch.tensor([low], dtype=torch.float32),
        torch.tensor([high], dtype=torch.float32),
        torch.tensor([square_sum], dtype=torch.float64),
    )


def fp8_groups(codes: torch.Tensor, rows: int, columns: int) -> CodeGroups:
    found = _empty(-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
    cpu_loops.fp8_groups(_array(codes), rows, columns, *found)
    return _groups(found)


def int8_groups(codes: torch.Tensor) -> CodeGroups:
    found = _empty(codes.shape[0], 1)
    return _groups(found, cpu_loops.int8_groups(_array(codes), *found))


def int4_groups(pairs: torch.Tensor, groups: int, flipped: int) -> CodeGroups:
    found = _empty(pairs.shape[0], groups)
    return _groups(found, cpu_loops.int4_groups(_array(pairs), np.uint8(flipped), *found))


def difference(wanted: torch.Tensor, found: torch.Tensor) -> Difference:
    return Difference(*cpu_loops.difference(_array(wanted), _array(found)))


def _array(tensor: torch.Tensor) -> Any:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def _empty(rows: int, columns: int) -> tuple[Any, Any, Any]:
    shape = (rows, columns)
    return np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape)


def _groups(found: tuple[Any, Any, Any], outer: int = 0) -> CodeGroups:
    low, high, square_sum = (torch.from_numpy(array) for array in found)
    return CodeGroups(low, high, square_sum, outer=outer)
