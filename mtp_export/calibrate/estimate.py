"""Operations, time, memory and disk that a calibration takes, from shapes and lengths of texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch

from mtp_checkpoints.families.base import Role, TensorMaker
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.calibrate.hidden_states import held_tokens
from mtp_export.calibrate.linears import Linears
from mtp_export.calibrate.main_model import MainCalibration
from mtp_export.calibrate.options import Method
from mtp_export.calibrate.run import TEXT_TOKENS, Calibration
from mtp_export.calibrate.scales import SEARCHED
from mtp_export.progress import format_bytes
from mtp_export.tune.estimate import operations_per_second
from mtp_export.tune.row_store import row_bytes
from mtp_kernels.quantize.awq import RATIOS
from mtp_runtime.layer_inputs import DEPTHS, ROW_DTYPE

_FLOAT32 = 4
_MATRICES = 5  # of a Hessian's size at once, while it is factored
_COPIES = 6  # of a unit's weights, while they are rounded
_SEARCH = 2 * (RATIOS + 1)  # by the same: what a weight loses under each of the scales
_FACTOR = 2  # operations by the cube of the columns: two Cholesky factors, and an inverse
_STREAMS = 6  # of hidden states of some texts at once, in memory
_STATES = 3  # of all texts on disk: before a layer, behind its attention, and after it
_HOURS_FROM = 120  # minutes
_ROUNDING = 8  # by the elements of a weight and its columns: GPTQ, and what three roundings lose


@dataclass(frozen=True)
class Estimate:
    """Operations and sizes of the calibration of a part.

    of: the part for people. rows: what goes into its layers; of the MTP layer at all depths
    together. operations: of sums, factors and rounding, of a main model its own run too; seconds:
    theirs, at the rate of a large product here. memory_bytes: at the peak of rounding, beside
    held_rows. disk_bytes: of the work folder. read_bytes: of the source, each time.
    """

    of: str
    rows: int
    weights: int
    operations: float
    seconds: float
    memory_bytes: int
    disk_bytes: int
    read_bytes: int

    @classmethod
    def of_mtp(cls, calibration: Calibration) -> Estimate:
        """Return what that of the MTP part will take beside the main model's own run."""
        linears = calibration.linears
        tokens = sum(
            min(TEXT_TOKENS, len(line.prompt) + len(line.answer or range(calibration.new_tokens)))
            for line in calibration.lines
        )
        rows = DEPTHS * tokens
        inputs, _ = _columns(linears)
        codes = sum(step.size_bytes for step in linears.steps.values())
        of_inputs = rows * sum(inputs.values()) * ROW_DTYPE.itemsize
        operations, memory_bytes = _rounding(linears, rows, calibration.options.method)
        kept = tokens * row_bytes(linears.plan.family.facts.hidden)
        return cls._made(linears, rows, operations, memory_bytes, kept + of_inputs + codes)

    @classmethod
    def of_main(cls, calibration: MainCalibration) -> Estimate:
        """Return what that of a main model will take."""
        linears, rows = calibration.linears, len(calibration.texts.tokens)
        row = linears.plan.family.facts.hidden * _FLOAT32
        held_bytes = _STREAMS * row * held_tokens(rows)
        operations, memory_bytes = _rounding(linears, rows, calibration.options.method)
        return cls._made(
            linears,
            rows,
            operations + 2 * rows * _elements_per_row(linears.plan.family),
            memory_bytes + held_bytes,
            _STATES * row * rows + calibration.most_kept_bytes + _squares_bytes(linears),
        )

    @classmethod
    def _made(
        cls, linears: Linears, rows: int, operations: float, memory_bytes: int, disk_bytes: int
    ) -> Estimate:
        tensors, weight_of = linears.plan.checkpoint.tensors, linears.plan.stored.weight_of
        names = (name for step in linears.steps.values() for name in step.inputs)
        own = {name for name in names if weight_of[name].weight.name in linears.steps}
        return cls(
            "the main model, layer by layer" if linears.part == MAIN else "the MTP part",
            rows=rows,
            weights=len(linears.steps),
            operations=operations,
            seconds=operations / operations_per_second("cpu", torch.float32),
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            read_bytes=sum(tensors[name].size_bytes for name in own),
        )

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 1)}

    @property
    def in_words(self) -> str:
        """A sentence for people."""
        minutes = self.seconds / 60
        time = f"{minutes:.0f} min" if minutes < _HOURS_FROM else f"{minutes / 60:,.0f} h"
        return (
            f"Calibration of {self.of}: {self.weights:,} weights by {self.rows:,} rows,"
            f" {self.operations / 1e12:,.1f} TFLOP, about {time} here;"
            f" {format_bytes(self.read_bytes)} of weights to read, and once more as they are"
            f" written; {format_bytes(self.disk_bytes)} in the work folder,"
            f" {format_bytes(self.memory_bytes)} of memory."
        )


def _rounding(linears: Linears, rows: int, method: Method) -> tuple[float, int]:
    """Return the operations of choosing codes by rows, and the bytes of memory that it takes."""
    operations, memory_bytes = _operations(linears, rows), _memory_bytes(linears)
    if method is not Method.AWQ:
        return operations, memory_bytes
    searching, searched_bytes = _searching(linears)
    return operations + searching, memory_bytes + searched_bytes


def _squares_bytes(linears: Linears) -> int:
    """Return the bytes of the sums of squares that are kept of what goes into linears."""
    inputs, inner = _columns(linears)
    return _FLOAT32 * sum((*inputs.values(), *inner.values()))


def _operations(linears: Linears, rows: int) -> float:
    """Return the operations of sums, factors, inner values of experts and rounding."""
    shapes = linears.shapes
    inputs, inner = _columns(linears)
    widths = [*inputs.values(), *inner.values()]
    operations = float(sum(2 * rows * k**2 + _FACTOR * k**3 for k in widths))
    operations += sum(_ROUNDING * n * k**2 for n, k in (shapes[name] for name in linears.steps))
    into_inner = (prod(shapes[n]) for unit in linears.of_experts if unit.down for n in unit.weights)
    return operations + 2 * rows * sum(into_inner)


def _memory_bytes(linears: Linears) -> int:
    """Return the bytes of Hessians and weights while one is rounded."""
    inputs, inner = _columns(linears)
    largest = max(map(prod, linears.shapes.values()))
    widest = max((*inputs.values(), *inner.values()))
    return _FLOAT32 * (_MATRICES * widest**2 + _COPIES * largest)


def _searching(linears: Linears) -> tuple[float, int]:
    """Return the operations of the searches of scales, and the bytes of weights that one holds."""
    shapes = linears.shapes
    units = [unit for unit in linears.of_experts if unit.down in linears.steps]
    ups = [unit.weights[-1] for unit in units]
    rounded = (up for up in ups if up in linears.steps)
    searched = [up for up in rounded if linears.convert(up).format.of_whole_matrix]
    downs = [shapes[name] for name in (*searched, *(unit.down for unit in units if unit.down))]
    searches = [
        [shapes[n] for unit in of_layer[:SEARCHED] for n in unit.weights]
        for of_layer in linears.experts
    ]
    operations = float(sum(_SEARCH * n * k**2 for n, k in (*downs, *chain(*searches))))
    return operations, _FLOAT32 * max(sum(map(prod, some)) for some in searches)


def _elements_per_row(family: ModelSpec) -> float:
    """Return the elements of main layers that a row is multiplied with: of attention twice, before
    its codes are chosen and after."""
    total = 0.0
    for layer in family.layers:
        rows, share = layer.feed_forward, 1.0
        if isinstance(rows, Moe):
            share = rows.router.routing.experts_per_token / rows.experts
        for tensor in layer.tensors(family.facts.hidden, TensorMaker(family.facts.dtype)):
            times = {Role.ATTENTION: 2.0, Role.ROUTED_EXPERT: share}.get(tensor.role, 1.0)
            total += times * prod(tensor.shape)
    return total


def _columns(linears: Linears) -> tuple[dict[str, int], dict[str, int]]:
    """Return the columns of what goes into linears, and of what experts make of it, by name."""
    shapes = linears.shapes
    units = linears.of_experts
    of_experts = {name for unit in units for name in unit.every}
    inputs = {unit.input: shapes[unit.weights[0]][1] for unit in units}
    inputs |= {name: shape[1] for name, shape in shapes.items() if name not in of_experts}
    return inputs, {unit.down: shapes[unit.down][1] for unit in units if unit.down in linears.steps}
