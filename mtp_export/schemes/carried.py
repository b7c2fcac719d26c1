"""Transform of a weight that changes its layout and not its numbers: nvfp4 of compressed-tensors
and of ModelOpt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import OF_ROWS
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import bytes_of


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
