"""Transforms of a weight that change its layout and not its numbers: nvfp4 of compressed-tensors
and of ModelOpt; integers and mxfp4 in blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.formats.base import OF_ROWS
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import bytes_of, converting, row_pieces, row_ranges


@dataclass(frozen=True)
class Carry:
    """Codes and scales of groups of a weight as they are, and the numbers of the whole matrix and
    of its inputs, whose reciprocals are written where one layout divides by what the other
    multiplies. A number of inputs that the source has none of is 1, as where they are quantized.
    """

    inverted: bool
    name: ClassVar[str] = "carry"
    uses_torch: ClassVar[bool] = False

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the codes and scales; raises InvalidInputError for a number that is no scale."""
        import numpy as np

        for number, stream in enumerate(inputs):
            for block in stream.blocks():
                own = block if number < OF_ROWS else self._number(stream, block)
                sink(number, own)
        for number in range(len(inputs), len(outputs)):
            sink(number, bytes_of(np.ones(1, np.float32)))
        return {}

    def _number(self, stream: TensorStream, block: memoryview) -> memoryview:
        import numpy as np

        value: Any = np.frombuffer(block, "<f4")
        if not (np.isfinite(value).all() and (value > 0).all()):
            raise InvalidInputError(
                f"Tensor {stream.info.name} is no scale",
                where=stream.info.path,
                expected="a finite number above 0",
                found=value.tolist(),
                todo="Get the checkpoint again",
            )
        return bytes_of(np.float32(1) / value if self.inverted else value)


@dataclass(frozen=True)
class CarryToBlocks:
    """Codes and scales of groups of a weight as blocks of a GGUF file, with the same numbers."""

    format: WeightFormat
    source: WeightFormat
    name: ClassVar[str] = "carry_to_blocks"
    uses_torch: ClassVar[bool] = False

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the blocks, some rows at a time; raises UnsupportedError for a scale that half
        precision does not hold exactly, InvalidInputError for one that is no number."""
        import numpy as np

        from mtp_kernels.quantize.ggml_carried import carried_blocks

        codes = inputs[0].info
        for start, stop in row_ranges(codes):
            with converting(codes, (start, stop)):
                own, scale = (
                    np.frombuffer(one.data, np.uint8).reshape(one.rows, -1)
                    for one in row_pieces(inputs, self.source, start, stop)
                )
                blocks = carried_blocks(self.format.storage, self.source.storage, own, scale)
            sink(0, bytes_of(blocks))
        return {}
