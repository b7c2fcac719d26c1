"""Functions of single floats, free of branches, so that LLVM makes vector code of loops over them.

Vector code and the loop's scalar rest compute the same bits: nothing is contracted or reordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import inner

LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
LOG2_E = np.float32(1.44269504088896341)
ROUNDER = np.float32(1.5 * 2.0**23)  # adding it rounds to an integer
ROUNDER_BITS = np.int32(0x4B400000)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ONE = np.float32(1.0)
# Minimax coefficients of exp on [-ln(2)/2, ln(2)/2] (Cephes, expf).
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@inner
def exponential(x: Any) -> Any:
    """Return exp(x) of a float32, between exp(-87) and exp(88); NaN stays NaN."""
    bounded = LOWEST if x < LOWEST else (HIGHEST if x > HIGHEST else x)
    rounded = bounded * LOG2_E + ROUNDER
    power = np.int32(np.float32(rounded).view(np.int32) - ROUNDER_BITS)
    whole = rounded - ROUNDER
    rest = bounded - whole * LN2_HIGH - whole * LN2_LOW
    series = ((((C0 * rest + C1) * rest + C2) * rest + C3) * rest + C4) * rest + C5
    value = series * rest * rest + rest + ONE
    bits = np.int32(np.float32(value).view(np.int32) + np.int32(power << np.int32(23)))
    return np.int32(bits).view(np.float32) if x == x else x


@inner
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of a float32."""
    return ONE / (ONE + exponential(-x))
