"""Checks of tensor arguments that the public functions of several kernels make."""

from __future__ import annotations

import torch

MAY_BE_EMPTY = ("T", "b", "pages", "max_pages")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check one tensor's type, dtype, shape, device and that it is contiguous.

    Raises as check_shape does.
    """
    check_shape(name, tensor, shape, dtypes)
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, found on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected contiguous, found strides {tensor.stride()}")


def check_shape(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check one tensor's type, dtype and shape.

    A letter in `shape` stands for any size above 0, one of MAY_BE_EMPTY also for 0. Raises
    TypeError or ValueError that says what was expected and what was found.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected dtype {' or '.join(map(str, dtypes))}, found {tensor.dtype}"
        )
    found = tuple(tensor.shape)
    if len(found) != len(shape) or not all(map(_fits, found, shape)):
        raise ValueError(
            f"{name}: expected shape [{', '.join(map(str, shape))}], found {list(found)}"
        )


def check_cached_lengths(
    rows: int,
    kv_cache: torch.Tensor,  # [.., pages, page, width]
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
) -> None:
    """Check on the CPU that cu_q covers the rows in order, and that every used page exists."""
    starts, lengths = cu_q.tolist(), kv_lens.tolist()
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(f"cu_q: expected 0 rising to {rows}, found {starts}")
    if not lengths:
        return
    pages, page = kv_cache.shape[-3:-1]
    capacity = page_table.shape[1] * page
    if min(lengths) < 0 or max(lengths) > capacity:
        raise ValueError(f"kv_lens: expected 0 to {capacity} tokens, found {lengths}")
    low, high = (int(end) for end in page_table.aminmax()) if capacity else (0, -1)
    if low >= 0 and high < pages:  # telling used pages from unused ones costs more
        return
    outside = (page_table < 0) | (page_table >= pages)
    outside &= torch.arange(page_table.shape[1]) * page < kv_lens[:, None]
    if outside.any():
        request, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"page_table: expected page ids 0 to {pages - 1}, "
            f"found {int(page_table[request, column])} at [{request}, {column}]"
        )


def _fits(found: int, expected: int | str) -> bool:
    if isinstance(expected, str):
        return found > 0 or expected in MAY_BE_EMPTY
    return found == expected
