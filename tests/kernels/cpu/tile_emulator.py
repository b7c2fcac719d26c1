"""Matrix units (AMX) in numpy: what compiled code calls in place of their instructions."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from llvmlite import ir

from mtp_kernels.cpu import matrix_units
from mtp_kernels.cpu.code import INT, integer
from mtp_kernels.cpu.matrix_units import ROW_BYTES, TILE, TILE_BYTES

_own = threading.local()  # each thread's tiles


def _tile(number: int, dtype: Any = np.int32) -> np.ndarray:
    if not hasattr(_own, "tiles"):
        _own.tiles = np.zeros((8, TILE_BYTES), np.uint8)
    return _own.tiles[number].reshape(TILE, ROW_BYTES).view(dtype)


def _rows_at(address: int, stride: int) -> list[np.ndarray]:
    row = ctypes.c_uint8 * ROW_BYTES
    return [np.ctypeslib.as_array(row.from_address(address + r * stride)) for r in range(TILE)]


def _load(tile: int, address: int, stride: int) -> None:
    _tile(tile, np.uint8)[:] = _rows_at(address, stride)


def _store(tile: int, address: int, stride: int) -> None:
    for target, row in zip(_rows_at(address, stride), _tile(tile, np.uint8), strict=True):
        target[:] = row


def _zero(tile: int, *_: int) -> None:
    _tile(tile)[:] = 0


products = 0  # so far


def _dot_bytes(total: int, first: int, second: int) -> None:
    _count()
    a = _tile(first, np.int8).reshape(TILE, TILE, 4).astype(np.int32)
    b = _tile(second, np.int8).reshape(TILE, TILE, 4).astype(np.int32)
    _tile(total)[:] += np.einsum("rkt,kct->rc", a, b)


def _dot_pairs(total: int, first: int, second: int) -> None:
    _count()
    a, b = (
        (_tile(tile, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(TILE, TILE, 2)
        for tile in (first, second)
    )
    sums = np.zeros((TILE, TILE, 2), np.float32)
    for k in range(TILE):
        sums += a[:, k, None] * b[None, k]
    _tile(total, np.float32)[:] += sums[..., 0] + sums[..., 1]


def _count() -> None:
    global products
    products += 1


_INSTRUCTIONS = {
    "tileloadd64": _load,
    "tilestored64": _store,
    "tilezero": _zero,
    "tdpbssd": _dot_bytes,
    "tdpbf16ps": _dot_pairs,
}
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_functions = {name: _FUNCTION(code) for name, code in _INSTRUCTIONS.items()}


def tile_call(builder: Any, name: str, *operands: Any) -> None:
    """Emit a call of the function that does what the instruction would; none sets tiles up."""
    if name in ("ldtilecfg", "tilerelease"):
        return
    values = [_as_integer(builder, operand) for operand in (*operands, 0, 0)[:3]]
    kind = ir.FunctionType(ir.VoidType(), [INT] * 3)
    address = ctypes.cast(_functions[name], ctypes.c_void_p).value
    builder.call(builder.inttoptr(integer(address), kind.as_pointer()), values)


def _as_integer(builder: Any, operand: Any) -> Any:
    if isinstance(operand, int):
        return integer(operand)
    return operand if operand.type == INT else builder.ptrtoint(operand, INT)


def emulate() -> None:
    """Have all code that is compiled from now on multiply on tiles; before kernels are imported."""
    matrix_units.HAS_TILES = True
    matrix_units.tile_call = tile_call
