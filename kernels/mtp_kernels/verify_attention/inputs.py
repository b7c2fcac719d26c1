"""Arguments of a backend: the checked tensors of one call, their sizes, and its workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import sub

import torch

from mtp_kernels.tensor_checks import check_cached_lengths, check_tensor

Dtypes = tuple[torch.dtype, ...]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
COUNT = (torch.int32,)


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
    """Tensors of one call, contiguous and on one device.

    Request i owns query rows cu_q[i] to cu_q[i+1], in order of position; their number, q_len, may
    be 0. kv_lens[i] counts its cached tokens, those of the query rows included, so row j of the
    request sees the first kv_lens[i] - (q_len - 1 - j) tokens. Page ids past a request's last
    token, and cache slots past it, are never used.

    The latent is also the value. A split cache has its rope keys in rope_cache, and then kv_lens
    and cu_q lie on the CPU: the form of ascend_npu, which reference takes too. Of a float8_e4m3fn
    cache a token's c+r stored values all stand for value * kv_scale.
    """

    q_latent: torch.Tensor  # [T, h, c] bfloat16, float16 or float32
    q_rope: torch.Tensor  # [T, h, r], the same
    kv_cache: torch.Tensor  # [pages, page, c+r], latent first, or [pages, page, c]; the same or fp8
    page_table: torch.Tensor  # [b, max_pages] int32
    kv_lens: torch.Tensor  # [b] int32
    cu_q: torch.Tensor  # [b+1] int32
    scale: float
    rope_cache: torch.Tensor | None = None  # [pages, page, r]
    kv_scale: torch.Tensor | None = None  # [pages, page] float32
    max_q_len: int | None = None  # most query rows of a request; counts where cu_q is on a GPU

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the call."""
        queries, heads, latent = self.q_latent.shape
        if self.max_q_len is not None and self.q_latent.device.type != "cpu":
            max_q_len = min(self.max_q_len, queries)
        else:
            starts = self.cu_q.tolist()
            max_q_len = max(map(sub, starts[1:], starts), default=0)
        return Sizes(
            batch=len(self.page_table),
            queries=queries,
            max_q_len=max_q_len,
            kv_tokens=self.page_table.shape[1] * self.kv_cache.shape[1],
            heads=heads,
            latent=latent,
            rope=self.q_rope.shape[2],
            page=self.kv_cache.shape[1],
            dtype=self.q_latent.dtype,
            kv_dtype=self.kv_cache.dtype,
        )

    def check(self) -> None:
        """Check types, shapes, dtypes, devices and layouts; on the CPU the contents too."""
        device, dtype = self.q_latent.device, self.q_latent.dtype

        def check(name: str, *shape: int | str, dtypes: Dtypes, on: torch.device = device) -> None:
            check_tensor(name, getattr(self, name), shape=shape, dtypes=dtypes, device=on)

        check("q_latent", "T", "h", "c", dtypes=DTYPES)
        queries, heads, latent = self.q_latent.shape
        check("q_rope", queries, heads, "r", dtypes=(dtype,))
        rope, lengths_on = self.q_rope.shape[2], device
        width = latent + rope if self.rope_cache is None else latent
        check("kv_cache", "pages", "page", width, dtypes=(dtype, FP8))
        slots, kv_dtype = self.kv_cache.shape[:2], self.kv_cache.dtype
        if self.rope_cache is not None:
            lengths_on = torch.device("cpu")
            check("rope_cache", *slots, rope, dtypes=(kv_dtype,))
        if (kv_dtype == FP8) != (self.kv_scale is not None):
            found = "none" if self.kv_scale is None else "one"
            raise ValueError(
                f"kv_scale: expected one with a float8_e4m3fn kv_cache and only then, "
                f"found {found} with {kv_dtype}"
            )
        if self.kv_scale is not None:
            check("kv_scale", *slots, dtypes=(torch.float32,))
        check("page_table", "b", "max_pages", dtypes=COUNT)
        batch = len(self.page_table)
        check("kv_lens", batch, dtypes=COUNT, on=lengths_on)
        check("cu_q", batch + 1, dtypes=COUNT, on=lengths_on)
        if device.type == "cpu":
            check_cached_lengths(queries, self.kv_cache, self.page_table, self.kv_lens, self.cu_q)


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
