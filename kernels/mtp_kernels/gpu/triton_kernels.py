"""Functions that the Triton kernels of several rooms share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_fp8(codes, dtype: tl.constexpr):
    """Values of fp8 codes, by the device's conversion."""
    values = codes.to(tl.float16)
    if dtype == tl.bfloat16:
        # The conversion of float16 itself has a fraction of the throughput.
        values = values.to(tl.float32)
    return values.to(dtype)
