"""Passes over rows, each run by a team of threads: layers, norms, projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.panel_forms import PANEL, Panel
from mtp_kernels.cpu.team import process_team, share
from mtp_kernels.cpu.vectors import address, borrowed, rows_of
from mtp_kernels.decoder import Matrix
from mtp_kernels.decoder.compiled_cpu.attention import attention
from mtp_kernels.decoder.compiled_cpu.experts import NOT_PICKED, feed_forward
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    STRIP,
    STRIP_PANELS,
    block_of,
    copy,
    norm_rows,
    panel_of,
    panels_of,
    project,
)


@inner
def run_layers(
    member: Any, table: Any, sizes: Any, batch: Any, caches: Any, scratch: Any, x: Any
) -> None:
    """Run the stream x [T, d] through all layers, in place; caches [layers, slots, slot]."""
    for index in range(table.size):
        layer = table[index]
        attention(member, layer, sizes, batch, caches[index], scratch, x)
        feed_forward(member, layer, sizes, scratch, x)


@compiled
def run_norm(member: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Write the RMS norm of rows [T, d]."""
    first, last = share(member, x.shape[0])
    norm_rows(x[first:last], weight, eps, out[first:last])


class Best(NamedTuple):
    """Best output of every row among each member's panels, and its value: [members, T]."""

    values: Any
    outputs: Any


class Product(NamedTuple):
    """Outputs of a product as they are written: all of them, or where `best` has members, the best
    of each row alone."""

    outputs: Any  # their number
    out: Any  # [T, outputs]
    best: Best


def whole_product(out: np.ndarray) -> Product:
    """Return the product whose outputs [T, n] are all written."""
    none = Best(np.empty((0, 0), np.float32), np.empty((0, 0), int))
    return Product(out.shape[1], out, none)


def best_product(outputs: int, members: int, rows: int) -> Product:
    """Return the product of which the best of a number of outputs is written."""
    best = Best(np.empty((members, rows), np.float32), np.empty((members, rows), int))
    return Product(outputs, np.empty((0, 0), np.float32), best)


@compiled
def run_project(member: Any, x: Any, weight: Any, product: Product) -> None:
    """Multiply x [T, d] with a weight, given as its first panel, by panels."""
    x, product = borrowed((x, product))
    rows, best = rows_of(x), product.best
    finds = best.outputs.shape[0] > 0
    made = np.empty((BLOCK_ROWS, STRIP), np.float32)
    for row in range(rows.count if finds else 0):
        best.values[member.number, row], best.outputs[member.number, row] = NOT_PICKED, 0
    first, last = share(member, panels_of(product.outputs))
    for panel in range(first, last, STRIP_PANELS):
        start, count = panel * PANEL, min(STRIP_PANELS, last - panel)
        size = min(count * PANEL, product.outputs - start)
        packed = panel_of(weight.at, weight.form, panel, weight.count)
        for row in range(0, rows.count, BLOCK_ROWS):
            block = block_of(rows, row, rows.count)
            project(block, packed, (0, count), address(made), STRIP)
            for r in range(block.count):
                if finds:
                    note_best(member, made[r, :size], start, best, row + r)
                else:
                    copy(made[r], product.out[row + r, start : start + size])


@inner
def note_best(member: Any, made: Any, start: Any, best: Any, row: Any) -> None:
    """Note the best of a row's outputs from `start` on; of equal ones the first stays."""
    for column in range(made.size):
        if made[column] > best.values[member.number, row]:
            best.values[member.number, row] = made[column]
            best.outputs[member.number, row] = start + column


@inner
def best_of(best: Any, row: Any) -> Any:
    """Return a row's best output; members' panels are in order, so the first of equals is
    lowest."""
    number = 0
    for other in range(1, len(best.values)):
        if best.values[other, row] > best.values[number, row]:
            number = other
    return best.outputs[number, row]


class Norm:
    """RMS norm with a weight [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous().numpy()
        self.eps = np.float32(eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm rows [T, d]."""
        out = torch.empty_like(x)
        process_team().run(run_norm, 1, x.numpy(), self.weight, self.eps, out.numpy())
        return out


@dataclass(frozen=True)
class Projection:
    """y = x @ matrix.T for a matrix [out, in] packed in panels, and what keeps their memory."""

    outputs: int
    first_panel: Panel
    memory: object = None

    @classmethod
    def packed(cls, matrix: Matrix, packer: Packer) -> Projection:
        """Pack a matrix."""
        outputs, inputs = matrix.shape
        packed = packer.matrix(matrix)
        first = Panel(packed.panels.ctypes.data, inputs, packed.form)
        return cls(outputs, first, packed.panels)

    @property
    def multiplications(self) -> int:
        """Multiplications for each row."""
        return self.outputs * int(self.first_panel.count)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project rows [T, in] to [T, out]."""
        out = x.new_empty(len(x), self.outputs)
        self._run(x, self._threads(x), whole_product(out.numpy()))
        return out

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T], the first of equal ones."""
        threads = self._threads(x)
        product = best_product(self.outputs, threads, len(x))
        self._run(x, threads, product)
        values, outputs = product.best
        first = values.argmax(axis=0)  # members' panels are in order
        return torch.from_numpy(outputs[first, np.arange(len(x))])

    def _threads(self, x: torch.Tensor) -> int:
        return process_team().threads_for(len(x) * self.multiplications)

    def _run(self, x: torch.Tensor, threads: int, product: Product) -> None:
        rows = x.contiguous().numpy()
        process_team().run(run_project, threads, rows, self.first_panel, product)
