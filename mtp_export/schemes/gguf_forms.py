"""Transform of steps that write a tensor of a GGUF file in another form than it is released in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.containers.gguf_forms import Elements, Form
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import array_of, bytes_of, converting, quality

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reform:
    """A tensor in another form, in its own element type, in float32 or in a format. It is in memory
    as a whole, as its heads change places."""

    form: Form
    format: WeightFormat = UNQUANTIZED
    source: WeightFormat = UNQUANTIZED
    scale_rule: str = "minmax"

    name: ClassVar[str] = "reform"
    uses_torch: ClassVar[bool] = True

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the tensor of a file (InvalidInputError for damaged values)."""
        import torch

        from mtp_kernels import quantize

        weight = inputs[0].info
        values, *scale = (stream.rows(0, stream.info.shape[0]) for stream in inputs)
        converts = self.format != UNQUANTIZED or self.source != UNQUANTIZED
        with converting(weight, (0, weight.shape[0])):
            if converts:
                own = self.source.source(values, *scale) if scale else values
                values = quantize.checked_values(own)
            if outputs[0].dtype == DType.F32:
                values = values.float()
            values = _formed(values, self.form).contiguous()
            errors, rows = [], [output.shape[0] for output in outputs]
            for number, own in enumerate(torch.split(values, rows)):
                if converts:
                    (own, *_), error = self.format.quantize(own.contiguous(), self.scale_rule)
                    errors.append(error)
                sink(number, bytes_of(array_of(own)))
        return quality(errors) if converts else {}


def _formed(values: torch.Tensor, form: Form) -> torch.Tensor:
    import torch

    if form.rows is not None:
        values = values[torch.from_numpy(form.rows.released())]
    if form.columns is not None:
        values = values[:, torch.from_numpy(form.columns.released())]
    if form.elements is Elements.PLUS_ONE:
        return values + 1
    return -torch.exp(values) if form.elements is Elements.RATE else values
