"""Transform of steps that write a tensor of a GGUF file in another form than it is released in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.gguf_forms import Elements, Form
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import array_of, bytes_of, converting, quality

if TYPE_CHECKING:
    import torch

_PIECE_ELEMENTS = 1 << 20
# Rows of the released tensor, by the first one and the one after the last.
Read = Callable[[int, int], "torch.Tensor"]


@dataclass(frozen=True)
class Reform:
    """A tensor in another form, in its own element type, in float32 or in a format. Rows that
    change places are read from theirs, some at a time."""

    form: Form
    format: WeightFormat = UNQUANTIZED
    source: WeightFormat = UNQUANTIZED
    scale_rule: str = "minmax"

    name: ClassVar[str] = "reform"
    uses_torch: ClassVar[bool] = True

    @property
    def converts(self) -> bool:
        """True where elements are quantized, or were."""
        return self.format != UNQUANTIZED or self.source != UNQUANTIZED

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the tensor of a file (InvalidInputError for damaged values)."""
        import torch

        stream, *others = inputs
        scale = [other.rows(0, other.info.shape[0]) for other in others]
        errors = []
        with TensorReader(stream.info) as reader:
            read = stream.rows if self.form.rows is None else reader.rows
            for number, rows in self._pieces(stream.info, outputs):
                with converting(stream.info, (int(rows.min()), int(rows.max()) + 1)):
                    runs = (self._values(read, scale, *run) for run in _runs(rows))
                    values = torch.cat([*runs])
                    if outputs[0].dtype == DType.F32:
                        values = values.float()
                    values = _formed(values, self.form).contiguous()
                    if self.converts:
                        (values, *_), error = self.format.quantize(values, self.scale_rule)
                        errors.append(error)
                sink(number, bytes_of(array_of(values)))
        return quality(errors) if errors else {}

    def _pieces(
        self, weight: TensorInfo, outputs: Sequence[OutputTensor]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the number of an output, and the released rows of its next ones."""
        import numpy as np

        rows = np.arange(weight.shape[0]) if self.form.rows is None else self.form.rows.released()
        step = max(1, _PIECE_ELEMENTS // (BLOCK * prod(weight.shape[1:]))) * BLOCK
        first = 0
        for number, output in enumerate(outputs):
            for start in range(0, output.shape[0], step):
                count = min(step, output.shape[0] - start)
                yield number, rows[first + start : first + start + count]
            first += output.shape[0]

    def _values(
        self, read: Read, scale: Sequence[torch.Tensor], start: int, stop: int
    ) -> torch.Tensor:
        """Return rows of the weight (ValueError for damaged ones)."""
        from mtp_kernels import quantize

        if not scale:
            values = read(start, stop)
            return quantize.checked_values(values) if self.converts else values
        step = self.source.scale_rows
        top = start // step * step
        own = [one[top // step : -(-stop // step)] for one in scale]
        values = quantize.checked_values(self.source.source(read(top, stop), *own))
        return values[start - top :]


def _runs(rows: Any) -> Iterator[tuple[int, int]]:
    """Yield the first of rows that follow each other, and the one after the last."""
    import numpy as np

    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield int(run[0]), int(run[-1]) + 1


def _formed(values: torch.Tensor, form: Form) -> torch.Tensor:
    import torch

    if form.columns is not None:
        values = values[:, torch.from_numpy(form.columns.released())]
    if form.elements is Elements.PLUS_ONE:
        return values + 1
    return -torch.exp(values) if form.elements is Elements.RATE else values
