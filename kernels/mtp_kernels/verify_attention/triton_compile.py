"""Types and constants of attend_kernel's arguments, and its compilation for any GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from mtp_kernels.gpu.compiling import compile_for
from mtp_kernels.verify_attention import triton_kernels
from mtp_kernels.verify_attention.inputs import FP8, Sizes
from mtp_kernels.verify_attention.triton_tuning import Launch

# The names Triton gives dtypes in a signature.
TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    FP8: "fp8e4nv",
}
MIN_TOKENS = 16  # that tl.dot takes


def block_tokens(sizes: Sizes, launch: Launch) -> int:
    """Return the tokens of a block: the launch's, or less where a page then holds whole blocks."""
    inside = math.gcd(launch.tokens, sizes.page)
    return inside if inside >= MIN_TOKENS else launch.tokens


def attend_constants(sizes: Sizes, launch: Launch) -> dict[str, int | bool]:
    """Return the compile-time arguments of `attend_kernel`."""
    return {
        "HEADS": sizes.heads,
        "LATENT": sizes.latent,
        "ROPE": sizes.rope,
        "PAGE": sizes.page,
        "ROWS": launch.rows,
        "TOKENS": block_tokens(sizes, launch),
        "FP8": sizes.kv_dtype == FP8,
        "STAGES": launch.stages,
    }


def compile_attend(target: GPUTarget, sizes: Sizes, launch: Launch) -> Any:
    """Compile `attend_kernel` as a launch would."""
    queries = TYPE_NAMES[sizes.dtype]
    types = dict.fromkeys(("q_latent", "q_rope", "out"), f"*{queries}")
    types |= dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32")
    types |= dict.fromkeys(("page_table", "kv_lens", "cu_q", "starts"), "*i32")
    types |= dict.fromkeys(("part_requests", "share_in"), "*i32")
    types |= {"max_pages": "i32", "max_rows": "i32:16"}
    types |= {"kv_cache": f"*{TYPE_NAMES[sizes.kv_dtype]}", "scale_log2": "fp32"}
    constants: dict[str, object] = dict(attend_constants(sizes, launch))
    if sizes.kv_dtype == FP8:
        types["kv_scale"] = "*fp32"
    else:
        constants["kv_scale"] = None
    return compile_for(
        target, triton_kernels.attend_kernel, types, constants, {"num_warps": launch.warps}
    )
