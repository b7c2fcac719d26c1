"""Products of inputs rounded to bf16 with stored matrices, against float64 on what was rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import types
from numba.extending import intrinsic

from kernels.cpu.test_panels import DEPTH, STORED, Stored, error_of, values
from mtp_kernels.cpu import bf16_dots, nibbles
from mtp_kernels.cpu.code import PAIRS, VECTOR, integer, load, row_at, store
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.matrix_units import HAS_TILES, TILE
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.panel_forms import takes_bf16
from mtp_kernels.cpu.vectors import address
from mtp_kernels.decoder import Piece
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.passes import Projection
from mtp_kernels.quantize.row_codes import row_codes
from mtp_kernels.stored_linear import dequantize


def packed(rows: Piece) -> Projection:
    packer = Packer(Arena(), torch.float32, torch.bfloat16)
    return Projection.packed(Stored(rows[:40], rows[40:]), packer)


def stored(name: str, depth: int) -> tuple[Projection, torch.Tensor]:
    """A projection, and its matrix in float32."""
    if name == "bf16":
        rows = values(depth=depth).bfloat16()
        return packed(rows), rows.float()
    weight = STORED[name][0](values(depth=depth))
    return packed(row_codes(weight)), dequantize(weight, torch.float32)


@pytest.mark.parametrize(
    ("name", "depth"),
    [*((name, DEPTH) for name in ("bf16", *STORED)), ("bf16", 50), ("int8_channel", 200)],
)
def test_inputs_are_rounded(name: str, depth: int) -> None:
    projection, dense = stored(name, depth)
    assert takes_bf16(projection.first_panel.form)
    x = torch.randn(39, depth, generator=torch.Generator().manual_seed(1))
    whole = projection(x)
    assert error_of(whole, x.bfloat16(), dense) < 1e-6 < error_of(whole, x, dense)
    # Matrix units add in an order of their own, in whole tiles of rows alone.
    others = torch.cat([projection(some) for some in x.split(TILE - 1)])
    for count in range(1, 39):
        found, tiled = projection(x[:count]), count // TILE * TILE if HAS_TILES else 0
        assert torch.equal(found, torch.cat([whole[:tiled], others[tiled:count]]))


def test_halves_are_rounded_to_even_ones_and_numbers_that_are_not_finite_stay() -> None:
    projection, _ = stored("bf16", 50)
    one = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF]).to(torch.int32).view(torch.float32)
    x = torch.zeros(5, 50)
    x[:3, 0] = one
    x[3:, 7] = torch.tensor([math.nan, math.inf])
    assert one.bfloat16().tolist() == [1.0, 1.015625, math.inf]
    found = projection(x)
    assert torch.equal(found[:2], projection(x.bfloat16().float())[:2])
    assert not found[2:].isfinite().any()


def test_what_has_no_pairs_stays_in_float32() -> None:
    """Rows of an odd number of inputs, numbers in float32, and codes above minimums."""
    for rows in (values(depth=51).bfloat16(), values(depth=50)):
        projection = packed(rows)
        assert not takes_bf16(projection.first_panel.form)
        x = torch.randn(3, rows.shape[1])
        assert error_of(projection(x), x, rows) < 1e-6


def _run(add: Callable[..., Any]) -> Any:
    """Code of a sum of products of 16 pairs at two addresses, added to floats at a third."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second = (load(builder, at, PAIRS) for at in arguments[:2])
        total = load(builder, arguments[2], VECTOR)
        store(builder, add(builder, first, second, total), arguments[2])
        return context.get_dummy_value()

    def run(typing: Any, first: Any, second: Any, total: Any) -> Any:
        return types.void(*[types.int64] * 3), codegen

    return intrinsic(run)


def _pairs(read: Callable[..., Any]) -> Any:
    """Code that writes the four vectors of pairs of 16 words of codes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, out = arguments
        for k, pair in enumerate(read(builder, load(builder, words, PAIRS))):
            store(builder, pair, row_at(builder, out, integer(64), k))
        return context.get_dummy_value()

    def run(typing: Any, words: Any, out: Any) -> Any:
        return types.void(types.int64, types.int64), codegen

    return intrinsic(run)


_BY_FLOATS, _OWN = _run(bf16_dots.by_floats), _run(bf16_dots.add_pairs)
_NUMBERS, _PAIRS = _pairs(nibbles.joined_numbers), _pairs(nibbles.int4_pairs)


@compiled
def _sums(first: Any, second: Any, total: Any, others: Any) -> None:
    _OWN(address(first), address(second), address(total))
    _BY_FLOATS(address(first), address(second), address(others))


@compiled
def _codes(words: Any, found: Any, others: Any) -> None:
    _PAIRS(address(words), address(found))
    _NUMBERS(address(words), address(others))


def test_every_cpu_adds_pairs_with_the_same_bits() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        numbers = generator.standard_normal((2, 32)).astype(np.float32)
        first, second = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        total = generator.standard_normal(16).astype(np.float32)
        others = total.copy()
        _sums(first, second, total, others)
        assert np.array_equal(total, others)


def test_every_cpu_reads_int4_as_the_same_pairs() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 16, dtype=np.uint32)
    found, others = np.zeros((2, 4, 16), np.uint32)
    _codes(words, found, others)
    assert np.array_equal(found, others)
    codes = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.int64)
    numbers = (codes - 16 * (codes > 7)).astype(np.float32)
    assert np.array_equal((found[1] << 16).view(np.float32), numbers[:, 1])
    assert np.array_equal((found[1] & 0xFFFF0000).view(np.float32), numbers[:, 5])
