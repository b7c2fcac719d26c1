"""Products of encoded inputs with packed codes, against float64 on what was encoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import binding
from numba import types
from numba.extending import intrinsic

from kernels.cpu.test_panels import DEPTH, STORED, Stored, error_of, values
from mtp_kernels import quantize
from mtp_kernels.cpu import byte_dots
from mtp_kernels.cpu.code import PAIRS, integer, load, row_at, store
from mtp_kernels.cpu.integer_panels import GROUP
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.panel_forms import takes_codes
from mtp_kernels.cpu.vectors import address
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.passes import Projection
from mtp_kernels.quantize.layouts import QuantizedWeight
from mtp_kernels.quantize.row_codes import row_codes
from mtp_kernels.stored_linear import dequantize

INTEGERS = [name for name in STORED if not name.startswith("fp8")]


def packed(weight: QuantizedWeight) -> Projection:
    codes = row_codes(weight)
    packer = Packer(Arena(), torch.float32, torch.int8)
    projection = Projection.packed(Stored(codes[:40], codes[40:]), packer)
    assert takes_codes(projection.first_panel.form)
    return projection


def encoded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the numbers multiplied in place of x: groups of at most
    GROUP, under one scale of the weight, rounded to multiples of a 127th of its largest number."""
    parts = []
    for start in range(0, x.shape[1], group):
        for part in x[:, start : start + group].split(GROUP, dim=1):
            largest = part.abs().amax(dim=1, keepdim=True)
            codes = torch.round(part * torch.where(largest > 0, 127 / largest, 0))
            parts.append(codes.double() * (largest / 127).double())
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("name", "depth"), [*((name, DEPTH) for name in INTEGERS), ("int8_channel", 200)]
)
def test_codes_are_multiplied_with_codes(name: str, depth: int) -> None:
    make, _, group = STORED[name]
    weight = make(values(depth=depth))
    projection = packed(weight)
    x = torch.randn(39, depth, generator=torch.Generator().manual_seed(1))
    x[2, :GROUP] = 0
    whole = projection(x)
    wanted = encoded(x, min(group, depth))
    assert error_of(whole, wanted, dequantize(weight, torch.float32)) < 1e-6
    assert (wanted - x).norm() < 0.01 * x.norm()
    for count in range(1, 39):
        assert torch.equal(projection(x[:count]), whole[:count])


def test_extreme_codes_do_not_overflow() -> None:
    """The least code of a weight and the largest inputs of either sign, added up over a group."""
    weight = quantize.quantize_int8_channel(values())[0]
    weight.packed.fill_(0)  # -128, as it is stored
    x = torch.ones(3, DEPTH)
    x[1] = -1
    found = packed(weight)(x)
    assert error_of(found, x, dequantize(weight, torch.float32)) < 1e-6


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_that_of_its_row(wrong: float) -> None:
    projection = packed(quantize.quantize_int4_group(values(), group_size=32)[0])
    x = values(3)
    clean = projection(x)
    x[1, 77] = wrong
    found = projection(x)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], clean[::2])


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    projection = packed(quantize.quantize_int8_channel(values())[0])
    assert torch.equal(projection(torch.full((1, DEPTH), 1e-42)), torch.zeros(1, len(values())))


def _sums(dot: Callable[..., Any], count: int) -> Any:
    """Code that adds dot of `count` times 16 words at each of two addresses to those at a third."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        unsigned, signed = (
            [load(builder, row_at(builder, at, integer(64), k), PAIRS) for k in range(count)]
            for at in arguments[:2]
        )
        total = load(builder, arguments[2], PAIRS)
        store(builder, dot(builder, total, unsigned, signed), arguments[2])
        return context.get_dummy_value()

    def sums(typing: Any, first: Any, second: Any, total: Any) -> Any:
        return types.void(*[types.int64] * 3), codegen

    return intrinsic(sums)


def by_pairs(dot: Callable[..., Any]) -> Callable[..., Any]:
    return lambda builder, total, unsigned, signed: dot(builder, total, *unsigned, *signed)


_OWN = _sums(partial(byte_dots.add_dots, small=False), 1)
_PLAIN = _sums(by_pairs(byte_dots.plain_dot), 1)
_EVEN_AND_ODD = _sums(by_pairs(byte_dots.even_and_odd_dot), 1)
_SMALL = _sums(byte_dots.small_dots, 8)


@compiled
def own_dot(member: Any, first: Any, second: Any, total: Any) -> None:
    _OWN(address(first), address(second), address(total))


@compiled
def plain_dot(member: Any, first: Any, second: Any, total: Any) -> None:
    _PLAIN(address(first), address(second), address(total))


@compiled
def even_and_odd_dot(member: Any, first: Any, second: Any, total: Any) -> None:
    _EVEN_AND_ODD(address(first), address(second), address(total))


@compiled
def small_dots(member: Any, first: Any, second: Any, total: Any) -> None:
    _SMALL(address(first), address(second), address(total))


def wanted_sums(unsigned: np.ndarray, signed: np.ndarray, start: np.ndarray) -> np.ndarray:
    products = unsigned.astype(np.int32) * signed
    return start + products.reshape(-1, 16, 4).sum(axis=(0, 2))


needs_avx2 = pytest.mark.skipif(
    not binding.get_host_cpu_features().get("avx2"), reason="AVX2's own instructions"
)


@pytest.mark.parametrize(
    "dot", [own_dot, plain_dot, pytest.param(even_and_odd_dot, marks=needs_avx2)]
)
def test_every_instruction_has_the_same_sums(dot: Callable[..., None]) -> None:
    generator = np.random.default_rng(0)
    unsigned = generator.integers(0, 256, 64, dtype=np.uint8)
    signed = generator.integers(-128, 128, 64, dtype=np.int8)
    unsigned[:8], signed[:8] = 255, [127] * 4 + [-128] * 4
    start = generator.integers(-1000, 1000, 16, dtype=np.int32)
    found = start.copy()
    dot(0, unsigned.view(np.int32), signed.view(np.int32), found)
    assert np.array_equal(found, wanted_sums(unsigned, signed, start))


@needs_avx2
@pytest.mark.parametrize("extreme", [127, -127])
def test_eight_products_of_small_bytes_stay_within_16_bits(extreme: int) -> None:
    unsigned = np.full(8 * 64, 15, np.uint8)
    signed = np.full(8 * 64, extreme, np.int8)
    signed[::5] = 1
    start = np.arange(16, dtype=np.int32)
    found = start.copy()
    small_dots(0, unsigned.view(np.int32), signed.view(np.int32), found)
    assert np.array_equal(found, wanted_sums(unsigned, signed, start))
