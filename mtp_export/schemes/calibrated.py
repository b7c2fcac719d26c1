"""Transforms of steps of which a calibration chose the codes, or scales that are folded in: they
are read from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import (
    Convert,
    array_of,
    bytes_of,
    converting,
    quality,
    row_ranges,
)

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.weights.folding import Folding

FOLDED = "folded"  # the fact of a tensor that was divided: its exponents, as letters
TEXT_FACTS = frozenset({FOLDED, "rounding", "reason"})  # those that are no figures


@dataclass(frozen=True)
class Calibrated:
    """Conversion of a weight with the codes that a calibration chose for it.

    convert is the conversion without calibration, of which inputs, outputs, format and scales are
    the same. file holds the tensors of module, but for constants, and what is known of their error.
    """

    convert: Convert
    file: Path
    module: str

    @property
    def name(self) -> str:
        return self.convert.name

    @property
    def uses_torch(self) -> bool:
        return True

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Write the tensors, and measure what they lose of the weight that is read.

        Raises InvalidInputError for a file that holds no such weight.
        """
        from mtp_export import state_files

        kept = state_files.load(self.file, mapped=True)[self.module]
        tensors, convert = kept["tensors"], self.convert
        constants = dict(convert.constants(inputs[0].info.shape, len(outputs)))
        self._check(tensors, outputs[: len(outputs) - len(constants)])
        for number, tensor in enumerate(tensors):
            sink(number, bytes_of(array_of(tensor)))
        for number, data in constants.items():
            sink(number, data)
        return {**quality(self._errors(inputs, kept)), **kept["facts"]}

    def _check(self, tensors: Sequence[torch.Tensor], outputs: Sequence[OutputTensor]) -> None:
        found = [(tuple(tensor.shape), tensor.nbytes) for tensor in tensors]
        expected = [(output.shape, output.size_bytes) for output in outputs]
        if found != expected:
            raise InvalidInputError(
                f"A file of the calibration does not hold {self.module} as it is to be written",
                where=self.file,
                expected=expected,
                found=found,
                todo="Remove it, and run the same command again",
            )

    def _errors(self, inputs: Sequence[TensorStream], kept: Mapping[str, Any]) -> list[Any]:
        """Return the errors of some rows after the other, beside a weight with its scales."""
        import torch

        from mtp_checkpoints.weights.folding import Folding
        from mtp_kernels.quantize import checked_values, error_of

        convert, weight, errors = self.convert, inputs[0].info, []
        stored = _Tensors(kept["tensors"])
        folding = Folding(*kept["folding"])
        for start, stop in row_ranges(weight):
            with converting(weight, (start, stop)):
                values = checked_values(convert.values(inputs, (start, stop), "cpu"))
                own = convert.format.encoded_rows(stored, start, stop)
                errors.append(error_of(folding.of(values, start), own.dequantize(torch.float32)))
        return errors


def kept_values(convert: Convert, kept: Mapping[str, Any]) -> torch.Tensor:
    """Return the weight [N, K], fp32, that what a calibration kept of it stands for."""
    import torch

    tensors = kept["tensors"]
    rows = len(tensors[0]) * max(1, convert.format.word_rows)
    return convert.format.encoded_rows(_Tensors(tensors), 0, rows).dequantize(torch.float32)


@dataclass(frozen=True)
class Folded:
    """Floats of a tensor with the scales of a file folded in: its columns multiplied, or what it
    has an element or a row of divided, a norm to which engines add an offset with it."""

    file: Path
    divides: bool = False
    offset: float = 0.0
    name: ClassVar[str] = "fold_scales"
    uses_torch: ClassVar[bool] = True

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Write the tensor, and return the exponents that divide it. Raises as of."""
        from mtp_checkpoints.weights.folding import as_letters

        (stream,) = inputs
        sink(0, bytes_of(array_of(self.of(stream.rows(0, stream.info.shape[0])))))
        exponents = self._folding.rows
        return {} if exponents is None else {FOLDED: as_letters(exponents)}

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the scales in it, in its dtype (InvalidInputError for a damaged
        file)."""
        return self._folding.of(values.float()).to(values.dtype)

    @cached_property
    def _folding(self) -> Folding:
        from mtp_checkpoints.weights.folding import Folding
        from mtp_export import state_files

        exponents = state_files.load(self.file)["exponents"]
        if self.divides:
            return Folding(rows=exponents, offset=self.offset)
        return Folding(columns=exponents)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a weight, in memory."""

    tensors: Sequence[torch.Tensor]

    @property
    def others(self) -> list[torch.Tensor]:
        return list(self.tensors[1:])

    @property
    def scale(self) -> torch.Tensor:
        return self.tensors[1]

    @property
    def whole_codes(self) -> torch.Tensor:
        return self.tensors[0]

    def codes(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the codes."""
        return self.tensors[0][start:stop]
