"""Products of bf16 tiles by every unit of this CPU, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from mtp_kernels.cpu.matrix_units import (
    ROW_BYTES,
    TILE,
    TILE_BYTES,
    Shape,
    configure,
    release,
)
from mtp_kernels.verify_attention.bf16_units import UNITS, product_on, units_here

SHAPES = [Shape(2, 2, adds=False), Shape(2, 1, adds=False), Shape(2, 2, adds=True)]
CHUNKS = 3


def tiled(matrix: torch.Tensor, terms: int) -> torch.Tensor:
    """Return a second operand as tiles [columns / 16, chunks, 16, 16, terms of an entry]."""
    chunks = matrix.view(CHUNKS, TILE, terms, -1, TILE)  # [chunk, row, term, tile, column]
    return chunks.permute(3, 0, 1, 4, 2).contiguous()


@pytest.mark.parametrize("shape", [*SHAPES, Shape(1, 2, adds=True)], ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_products(unit: str, shape: Shape) -> None:
    if unit not in units_here():
        pytest.skip(f"this CPU has no {unit}")
    product = product_on(unit, shape)

    @njit
    def run(a: int, b: int, c: int) -> None:
        configure()
        operands = (
            a, CHUNKS * ROW_BYTES, TILE * CHUNKS * ROW_BYTES, ROW_BYTES,
            b, ROW_BYTES, CHUNKS * TILE_BYTES, TILE_BYTES, CHUNKS,
            c, shape_columns * 4, TILE * shape_columns * 4, TILE * 4,
        )  # fmt: skip
        product(operands)
        release()

    shape_columns, terms = shape.b_tiles * TILE, UNITS[unit].entry_terms
    depth, dtype = CHUNKS * TILE * terms, torch.bfloat16 if terms == 2 else torch.float32
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape.a_tiles * TILE, depth, generator=generator).to(dtype)
    b = torch.randn(depth, shape_columns, generator=generator).to(dtype)
    c = torch.randn(shape.a_tiles * TILE, shape_columns, generator=generator)
    expected = a.double() @ b.double() + (c.double() if shape.adds else 0.0)
    packed = tiled(b, terms)
    run(a.data_ptr(), packed.data_ptr(), c.data_ptr())
    assert np.allclose(c.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)


def test_float32_runs_everywhere_and_faster_units_come_first() -> None:
    here = units_here()
    assert "float32" in here
    speeds = [UNITS[unit].speedup for unit in here]
    assert speeds == sorted(speeds, reverse=True)
