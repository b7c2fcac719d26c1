"""Products on matrix units (AMX): their instructions, and, emulated, what is computed by these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.compiled_apart import run_apart
from kernels.cpu import tile_emulator
from mtp_kernels.cpu import matrix_units
from mtp_kernels.cpu.code import INT, integer
from mtp_kernels.cpu.matrix_units import ROW_BYTES, TILE, TILE_BYTES, Product, Shape, multiply_tiles

CHUNKS = 3
BYTES, PAIRS = "tdpbssd", "tdpbf16ps"


def product_at(a: Any, b: Any, c: Any) -> Product:
    """A product of tiles a [2, CHUNKS], b [2, CHUNKS] and c [2, 2], each of them in one piece."""
    row, tile = integer(ROW_BYTES), integer(TILE_BYTES)
    operand = row, integer(CHUNKS * TILE_BYTES), tile
    chunks, sums = integer(CHUNKS), (row, integer(2 * TILE_BYTES), tile)
    return Product(a, *operand, b, *operand, chunks, c, *sums)


def emulated(instruction: str) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        multiply_tiles(instruction, builder, product_at(*arguments), Shape(2, 2, adds=True))
        return context.get_dummy_value()

    return intrinsic(lambda typing, a, b, c: (types.void(*[types.int64] * 3), codegen))


@pytest.mark.parametrize("instruction", [BYTES, PAIRS])
def test_tiles_are_multiplied(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_units, "tile_call", tile_emulator.tile_call)
    product = emulated(instruction)
    generator = np.random.default_rng(0)
    if instruction == BYTES:
        a, b = generator.integers(-128, 128, (2, 2, CHUNKS, TILE, TILE, 4), dtype=np.int8)
        c = generator.integers(-1000, 1000, (2, 2, TILE, TILE), dtype=np.int32)
    else:
        numbers = generator.standard_normal((2, 2, CHUNKS, TILE, TILE, 2)).astype(np.float32)
        a, b = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        c = generator.standard_normal((2, 2, TILE, TILE)).astype(np.float32)
    wide = [numbers_of(each) for each in (a, b, c)]
    wanted = wide[2] + np.einsum("imrkt,jmkct->ijrc", *wide[:2])

    @njit
    def run(a: int, b: int, c: int) -> None:
        product(a, b, c)

    run(a.ctypes.data, b.ctypes.data, c.ctypes.data)
    assert np.allclose(c, wanted, rtol=0, atol=0 if instruction == BYTES else 1e-4)


def numbers_of(values: np.ndarray) -> np.ndarray:
    """Return numbers, or the bits of bf16, in float64."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def assembly(instruction: str) -> str:
    """Return the code of a product and of what is around it, for a CPU that has tiles."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT] * 3), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    multiply_tiles(instruction, builder, product_at(*function.args), Shape(2, 2, adds=True))
    for set_up in (matrix_units.configure, matrix_units.release):
        set_up._defn(None)[1](Context(), builder, None, [])
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="sapphirerapids", opt=2)
    return machine.emit_assembly(binding.parse_assembly(str(module)))


class Context:
    def get_dummy_value(self) -> None:
        """Return nothing, which no code asks for."""


@pytest.mark.parametrize("instruction", [BYTES, PAIRS])
def test_a_cpu_with_tiles_runs_these_instructions(
    instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_units, "HAS_TILES", True)
    code = assembly(instruction)
    counts = {"ldtilecfg": 1, "tileloadd": 8, instruction: 4, "tilestored": 4, "tilerelease": 1}
    assert {name: code.count(f"{name}\t") or code.count(name) for name in counts} == counts


def test_tiles_are_set_up_as_full_ones() -> None:
    """The layout of ldtilecfg's operand: palette 1, then bytes of a row, then rows."""
    config = np.frombuffer(matrix_units._CONFIG, np.uint8)
    assert config.size == 64 and config[0] == 1 and not config[1:16].any()
    assert config[16:32].view(np.uint16).tolist() == [ROW_BYTES] * 8 and not config[32:48].any()
    assert config[48:56].tolist() == [TILE] * 8 and not config[56:].any()


@pytest.mark.nightly
@pytest.mark.parametrize("module", ["test_integer_panels", "test_bf16_panels"])
def test_stored_products_on_matrix_units(module: str, tmp_path: Path) -> None:
    """In a process whose compiled code has tiles, which are counted."""
    code = (
        "import sys, pytest\n"
        "from kernels.cpu import tile_emulator\n"
        "tile_emulator.emulate()\n"
        f"path = {str(Path(__file__).with_name(module + '.py'))!r}\n"
        "failed = pytest.main(['-q', '-p', 'no:cacheprovider', '-n', '0', path])\n"
        "print(f'products: {tile_emulator.products}')\n"
        "sys.exit(failed or not tile_emulator.products)\n"
    )
    run_apart(code, tmp_path)
