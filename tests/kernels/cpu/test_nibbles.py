"""Look-ups of e2m1 numbers as bytes, by every instruction that CPUs may lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu import nibbles
from mtp_kernels.cpu.code import load, store
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.vectors import address
from mtp_kernels.quantize.block_floats import E2M1

_BYTES = ir.VectorType(ir.IntType(8), 64)
HAS_AVX2 = binding.get_host_cpu_features().get("avx2", False)


def _found(look_up: Callable[..., Any]) -> Any:
    """Code that writes the numbers of 64 codes at an address in their place."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes = load(builder, arguments[0], _BYTES)
        store(builder, look_up(builder, codes), arguments[0])
        return context.get_dummy_value()

    def found(typing: Any, at: Any) -> Any:
        return types.void(types.int64), codegen

    return intrinsic(found)


_SHUFFLED, _COMPARED = _found(nibbles.shuffled), _found(nibbles.compared)


@compiled
def shuffled(member: Any, codes: Any) -> None:
    _SHUFFLED(address(codes))


@compiled
def compared(member: Any, codes: Any) -> None:
    _COMPARED(address(codes))


@pytest.mark.parametrize("look_up", [*([shuffled] if HAS_AVX2 else []), compared])
def test_codes_have_the_halves_of_their_numbers(look_up: Any) -> None:
    codes = np.random.default_rng(0).permutation(np.arange(64, dtype=np.int8) % 16)
    found = codes.copy()
    look_up(0, found)
    halves = np.array([*E2M1, *(-number for number in E2M1)]) * 2
    assert np.array_equal(found, halves[codes])
