"""A weight compared with its source's: the noise that a relation may leave, and first rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.orders import noise_of
from mtp_export.verify.diagnosis.sketches import Axis, Sketches, sketched, values

# Of a weight that is near already, a relation explains the difference if it leaves this much less.
NEARER_DB = 10.0
LEAST_NOISE = 1e-6  # what sums in float32 tell
WINDOW_ROWS = 128  # whole blocks of scales
_WINDOW_ELEMENTS = 1 << 20  # of weights of more axes than two


@dataclass(frozen=True)
class Compared:
    """A weight, its source's, and the sketches of both. other_scales: its codes are the source's
    with other scales, which no one factor explains."""

    weight: WeightOnDisk
    source: WeightOnDisk
    sketches: Sketches
    other_scales: bool = False

    @property
    def most_noise(self) -> float:
        """Noise that a relation may leave, as a share of the source's squares."""
        gate, level = self.weight.stored.format.gate.sqnr_db, self.sketches.level_db
        bound = gate if level < gate else level + NEARER_DB
        return max(LEAST_NOISE, 10 ** (-bound / 10))

    @property
    def noise(self) -> float:
        """The weight's difference as a share of the source's squares."""
        total = self.sketches.total
        return float(total.noise) / max(float(total.ww), 1e-30)

    @cached_property
    def first_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of the weight and of the source's in the first rows."""
        return self._rows(0)

    @cached_property
    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of both in the first rows, in the middle and in the last."""
        step = self._window_rows
        last = (self.weight.rows - 1) // step * step
        starts = sorted({0, last // step // 2 * step, last})
        windows = [self.first_rows, *map(self._rows, starts[1:])]
        found, wanted = zip(*windows, strict=True)
        return torch.cat(found), torch.cat(wanted)

    @property
    def _window_rows(self) -> int:
        shape = self.weight.stored.weight.shape
        if len(shape) <= 2:
            return WINDOW_ROWS
        return min(WINDOW_ROWS, max(1, _WINDOW_ELEMENTS // math.prod(shape[1:])))

    def _rows(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        stop = min(self.weight.rows, start + self._window_rows)
        return values(self.weight, start, stop), values(self.source, start, stop)

    @property
    def head(self) -> int | None:
        """Rows of a head, where the family says."""
        rotary = self.source.stored.weight.rotary
        heads = self.source.stored.weight.head_rows
        if heads is not None and heads.by_head:
            return sum(heads.sizes)
        return None if rotary is None else rotary.period

    def head_on(self, axis: Axis) -> int | None:
        """Rows of a head for the axis of rows, None for columns."""
        return self.head if axis is self.sketches.rows else None


def compare(weight: WeightOnDisk, source: WeightOnDisk, *, other_scales: bool = False) -> Compared:
    """Read a weight and its source's, of one shape. Raises ValueError for codes without a value."""
    return Compared(weight, source, sketched(weight, source), other_scales)


def share_of(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Return the noise of values as a share of the squares of those that are wanted."""
    return noise_of(found, wanted) / max(float(wanted.square().sum()), 1e-30)
