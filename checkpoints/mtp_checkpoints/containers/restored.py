"""Tensors that files have in another form than released ones, put back into the released form when
they are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.gguf_forms import Elements, Form
from mtp_checkpoints.containers.joined_halves import (
    Computed,
    JoinedHalves,
    decoded_values,
    raw_rows,
)
from mtp_checkpoints.dtypes import DType, tensor_bytes
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Place

_ROUNDING = 1e-6  # some units in the last place of numbers around 1
_OF_BF16 = 2.0**-8  # the same of a sum that bf16 holds, beside that share of the other summand


def held(tensor: TensorInfo) -> tuple[TensorInfo, ...]:
    """Return the tensors of files that one is computed of; itself alone for one that a file has."""
    file = tensor.file
    return file.tensors if isinstance(file, JoinedHalves | Restored) else (tensor,)


def restored(name: str, tensors: Sequence[TensorInfo], form: Form) -> TensorInfo:
    """Return a tensor of a file, or of its parts, under its released name, in the released form: in
    its element type, or in float32 where elements change, columns of blocks do, or parts differ.

    Raises InvalidInputError for a shape that the heads of the keys do not give.
    """
    tensor = tensors[0]
    shape = (sum(one.shape[0] for one in tensors), *tensor.shape[1:])
    for axis, order in ((0, form.rows), (1, form.columns)):
        if order is not None and (len(shape) <= axis or shape[axis] != order.count):
            raise InvalidInputError(
                f"Tensor {tensor.name} has another shape than the keys give",
                where=tensor.path,
                expected=f"{order.count} {'columns' if axis else 'rows'}, by ssm.* keys",
                found=list(shape),
                todo="Get the file again, or another one of the same model",
            )
    file = Restored(tuple(tensors), form)
    dtype = DType.F32 if file.is_computed else tensor.dtype
    shape = (shape[0], 1, *shape[1:]) if form.squeezed else shape
    return TensorInfo(name, dtype, shape, file, 0, tensor_bytes(dtype, shape))


@dataclass(frozen=True)
class Restored:
    """A file that holds one tensor alone, computed from one in another form, or from its parts."""

    tensors: tuple[TensorInfo, ...]
    form: Form
    sha256: None = None

    @property
    def tensor(self) -> TensorInfo:
        """The first one."""
        return self.tensors[0]

    @property
    def is_computed(self) -> bool:
        """True where the elements are computed in float32."""
        dtypes = {tensor.dtype for tensor in self.tensors}
        by_element = self.form.columns is not None and self.tensor.dtype.is_packed
        return self.form.elements is not Elements.SAME or by_element or len(dtypes) > 1

    @property
    def is_decoded(self) -> bool:
        """True where a tensor is of blocks, and this one of what they encode."""
        return self.is_computed and any(tensor.dtype.is_packed for tensor in self.tensors)

    @property
    def rounding(self) -> float:
        """Absolute error that the elements may have, as they were computed in float32."""
        if self.form.elements is Elements.SAME:
            return 0.0
        return _OF_BF16 if self.tensor.dtype is DType.BF16 else _ROUNDING

    @cached_property
    def path(self) -> Place:
        """Place of the tensor, with its name."""
        place = self.tensor.path
        if isinstance(place, Path):
            return place.with_name(f"{place.name}#{self.tensor.name}")
        return place / self.tensor.name

    def open(self, once: range | None = None) -> Computed:
        """Read the tensor and put it into its form (IoError, InvalidInputError for damage)."""
        import numpy as np

        read = decoded_values if self.is_computed else raw_rows
        rows: Any = np.concatenate([read(tensor) for tensor in self.tensors])
        if self.form.rows is not None:
            rows = rows[self.form.rows.of_file()]
        if self.form.columns is not None:
            rows = rows[:, self.form.columns.of_file()]
        if self.form.elements is Elements.PLUS_ONE:
            rows = rows - 1
        elif self.form.elements is Elements.RATE:
            with np.errstate(invalid="ignore", divide="ignore"):
                rows = np.log(-rows)
        with closing(self.tensor.file.open()) as file:
            version = file.version
        return Computed(np.ascontiguousarray(rows).reshape(-1).view("uint8").data, version)
