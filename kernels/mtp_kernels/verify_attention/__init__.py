"""Fused verification attention: the absorbed MLA attention of a few query tokens per request.

A request verifying n - 1 drafts brings n query tokens. They share one KV cache, so their queries
and heads form one block of rows and the cache is read once, not n times; only the last n - 1
columns are masked differently per row.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.tensor_checks import check_tensor
from mtp_kernels.verify_attention.inputs import Inputs, Sizes, Workspace

__all__ = [
    "BACKENDS",
    "Sizes",
    "Workspace",
    "check_sizes",
    "has_split_cache",
    "make_workspace",
    "verify_attention",
]

# Loaded on first use: a CPU user needs no Triton. A backend is a module with `attend` and
# `workspace_bytes`.
BACKENDS = {
    "reference": "mtp_kernels.verify_attention.reference",
    "torch_cpu": "mtp_kernels.verify_attention.torch_cpu",
    "compiled_cpu": "mtp_kernels.verify_attention.compiled_cpu",
    "triton_cuda": "mtp_kernels.verify_attention.triton_cuda",
    "ascend_npu": "mtp_kernels.verify_attention.ascend_npu",
}
# The backend that "auto" means on each torch device type; a CPU's bf16 goes to compiled_cpu, which
# is faster, in the sizes that it takes.
AUTO = {"cpu": "torch_cpu", "cuda": "triton_cuda", "npu": "ascend_npu"}
# Backends whose cache is split into latents and rope keys; their lengths lie on the host.
SPLIT_CACHE = ("ascend_npu",)
LSE_DTYPE = torch.float32


class Backend(Protocol):
    """Functions of a module named in `BACKENDS`."""

    def attend(
        self,
        inputs: Inputs,
        buffer: torch.Tensor,
        parts: int | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None: ...

    def workspace_bytes(self, sizes: Sizes, parts: int | None, device: torch.device) -> int: ...


def verify_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    scale: float,
    *,
    rope_cache: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    backend: str = "auto",
    max_q_len: int | None = None,
    workspace: Workspace | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query token to the cached tokens it may see; shapes and dtypes in `Inputs`.

    Returns out [T, h, c] in the dtype of q_latent, and lse [T, h] float32, the natural logarithm of
    the sum of exp(scale * score). A row that sees no token gets out 0 and lse -inf.

    max_q_len is the most query rows of a request; on a GPU rows past it are not computed. With it,
    or with `workspace` (from `make_workspace`), triton_cuda does not synchronise, so the call can
    be captured in a CUDA graph; without both it reads cu_q back to the host once. With `workspace`
    and `out` it does not allocate either. A workspace must not serve two calls at a time.

    ValueError or TypeError says what was expected and what was found. The contents of page_table,
    kv_lens and cu_q are checked on the CPU only: elsewhere that would synchronise.

    Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1, the absorbed form.
    """
    inputs = Inputs(
        q_latent=q_latent,
        q_rope=q_rope,
        kv_cache=kv_cache,
        page_table=page_table,
        kv_lens=kv_lens,
        cu_q=cu_q,
        scale=scale,
        rope_cache=rope_cache,
        kv_scale=kv_scale,
        max_q_len=max_q_len if workspace is None else workspace.sizes.max_q_len,
    )
    inputs.check()
    return run(inputs, backend=backend, workspace=workspace, out=out)


def run(
    inputs: Inputs,
    backend: str,
    workspace: Workspace | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by a backend that takes the inputs' form, into the caller's tensors or new ones."""
    sizes, device = inputs.sizes, inputs.q_latent.device
    name = backend_name(backend, device, sizes)
    check_cache_form(name, inputs.rope_cache)
    module = load_backend(name)
    parts = None if workspace is None else workspace.parts
    buffer = workspace_buffer(workspace, module.workspace_bytes(sizes, parts, device), device)
    out = outputs(inputs.q_latent, out)
    module.attend(inputs, buffer, parts, *out)
    return out


def make_workspace(
    *,
    batch: int,
    queries: int,
    max_q_len: int,
    kv_tokens: int,
    heads: int,
    page: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    latent: int = 512,
    rope: int = 64,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    parts: int | None = None,
) -> Workspace:
    """Allocate scratch memory for calls of `verify_attention` up to these sizes.

    Counts of requests, of query tokens in the batch (`queries`) and in one request (`max_q_len`),
    of cached tokens a request can have (at least the page table's width in tokens), of heads, and
    of tokens in a page. On a GPU the calls must keep to `max_q_len`: rows past it are not computed.
    `parts` cuts the batch's cache into that many ranges (triton_cuda; None: the tuning table's
    choice). ValueError if a size is not positive.
    """
    sizes = Sizes(
        batch=batch,
        queries=queries,
        max_q_len=max_q_len,
        kv_tokens=kv_tokens,
        heads=heads,
        latent=latent,
        rope=rope,
        page=page,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
    )
    counts = (batch, queries, max_q_len, kv_tokens, heads, latent, rope, page, parts or 1)
    if min(counts) < 1:
        raise ValueError(f"workspace sizes: expected all at least 1, found {sizes}, parts {parts}")
    device = torch.device(device)
    module = load_backend(backend_name(backend, device, sizes))
    size_bytes = module.workspace_bytes(sizes, parts, device)
    return Workspace(sizes, torch.empty(size_bytes, dtype=torch.uint8, device=device), parts)


def has_split_cache(device: torch.device) -> bool:
    """Return True for devices whose backend takes latents and rope keys as two tensors, and lengths
    on the CPU."""
    return AUTO.get(device.type) in SPLIT_CACHE


def backend_name(backend: str, device: torch.device, sizes: Sizes) -> str:
    """Return the name of a backend; "auto" goes by the device and the dtypes."""
    if backend == "auto":
        if device.type not in AUTO:
            raise ValueError(f"backend auto: expected a device of {sorted(AUTO)}, found {device}")
        backend = AUTO[device.type]
        if backend == "torch_cpu" and sizes.dtype == torch.bfloat16 and compiled_takes(sizes):
            backend = "compiled_cpu"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {sorted(BACKENDS)}, found {backend!r}")
    return backend


def check_sizes(sizes: Sizes, device: torch.device) -> None:
    """Raise ValueError for calls up to some sizes that the device's backend does not take."""
    load_backend(backend_name("auto", device, sizes)).workspace_bytes(sizes, None, device)


def load_backend(name: str) -> Backend:
    """Import the module of a backend."""
    return cast(Backend, import_module(BACKENDS[name]))


def check_cache_form(backend: str, rope_cache: torch.Tensor | None) -> None:
    """Refuse a cache in another form than a backend takes; the reference takes both."""
    if backend == "reference" or (rope_cache is not None) == (backend in SPLIT_CACHE):
        return
    forms = ("kv_cache alone", "kv_cache and rope_cache")
    expected, found = forms if rope_cache is not None else forms[::-1]
    raise ValueError(f"backend {backend}: expected {expected}, found {found}")


def compiled_takes(sizes: Sizes) -> bool:
    """Return True for bf16 sizes that compiled_cpu has."""
    return bool(import_module(BACKENDS["compiled_cpu"]).takes_bf16(sizes))


def outputs(
    q_latent: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caller's output tensors, checked, or new ones."""
    shape = tuple(q_latent.shape)
    if out is None:
        return torch.empty_like(q_latent), q_latent.new_empty(shape[:2], dtype=LSE_DTYPE)
    check_tensor("out[0]", out[0], shape=shape, dtypes=(q_latent.dtype,), device=q_latent.device)
    check_tensor("out[1]", out[1], shape=shape[:2], dtypes=(LSE_DTYPE,), device=q_latent.device)
    return out


def workspace_buffer(
    workspace: Workspace | None, needed_bytes: int, device: torch.device
) -> torch.Tensor:
    """Return the workspace's buffer, checked, or a new one."""
    if workspace is None:
        return torch.empty(needed_bytes, dtype=torch.uint8, device=device)
    buffer = workspace.buffer
    if buffer.device != device or buffer.numel() < needed_bytes:
        raise ValueError(
            f"workspace: expected at least {needed_bytes} bytes on {device}, found "
            f"{buffer.numel()} bytes on {buffer.device}, made for {workspace.sizes}"
        )
    return buffer
