"""Arguments of a backend: the checked tensors of one call, their sizes, and its workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call, or the largest that a workspace serves; counts, not bytes.

    `queries` is the sum of q_len over the batch, `kv_tokens` the most cached tokens of a
    request, `page` the tokens in a page. `kv_dtype` is `dtype` or `torch.float8_e4m3fn`.
    """

    batch: int
    queries: int
    max_q_len: int
    kv_tokens: int
    heads: int
    latent: int
    rope: int
    page: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class Workspace:
    """Scratch memory for calls up to `sizes`, owned by the caller and reused between calls.

    `buffer` is one byte tensor on the device of the call; its content means nothing between calls.
    `parts` is the number of ranges the batch's cache is cut into (triton_cuda only), None for the
    choice of the device's tuning table.
    """

    sizes: Sizes
    buffer: torch.Tensor
    parts: int | None


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call, already checked; shapes as in `verify_attention`."""

    q_latent: torch.Tensor  # [T, h, c]
    q_rope: torch.Tensor  # [T, h, r]
    kv_cache: torch.Tensor  # [pages, page, c+r], or [pages, page, c] beside a rope_cache
    rope_cache: torch.Tensor | None  # [pages, page, r]
    kv_scale: torch.Tensor | None  # [pages, page]
    page_table: torch.Tensor  # [b, max_pages]
    kv_lens: torch.Tensor  # [b]
    cu_q: torch.Tensor  # [b+1]
    scale: float
    sizes: Sizes


class BumpAllocator:
    """Bump allocator of typed, aligned tensors in a workspace's byte buffer, front to back."""

    ALIGNMENT_BYTES = 256

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor, uninitialised."""
        start = self.used_bytes
        self.used_bytes += array_bytes(shape, dtype)
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        return self.buffer[start : start + count].view(dtype).view(shape)


def array_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes `BumpAllocator.take` uses for an array, padding included."""
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    return -(-size // BumpAllocator.ALIGNMENT_BYTES) * BumpAllocator.ALIGNMENT_BYTES
