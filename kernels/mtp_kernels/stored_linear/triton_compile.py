"""Compilation of product_kernel for GPUs that need not be here."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from mtp_kernels.gpu.compiling import compile_for
from mtp_kernels.stored_linear.triton_cuda import Launch, codes_of, constants_of
from mtp_kernels.stored_linear.triton_kernels import product_kernel
from mtp_kernels.stored_linear.weights import StoredWeight

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
}


def compile_product(
    target: GPUTarget, weight: StoredWeight, launch: Launch, *, dtype: torch.dtype, experts: int
) -> Any:
    """Compile `product_kernel` for rows of a dtype; experts 0: for a single weight."""
    stored = codes_of(weight, target)
    types = dict.fromkeys(("x", "y"), f"*{TYPE_NAMES[dtype]}")
    types |= {"codes": f"*{TYPE_NAMES[stored.codes.dtype]}"}
    types |= dict.fromkeys(("N", "K", "width"), "i32:16")
    types |= dict.fromkeys(("count", "steps"), "i32")
    constants: dict[str, object] = dict(constants_of(stored, launch, experts))
    if stored.scale is None:
        constants |= {"scale": None}
    else:
        types |= {"scale": f"*{TYPE_NAMES[stored.scale.dtype]}"}
    if experts:
        types |= {"rows": "*i64", "ends": "*i32"}
    else:
        constants |= {"rows": None, "ends": None}
    return compile_for(target, product_kernel, types, constants, {"num_warps": launch.warps})
