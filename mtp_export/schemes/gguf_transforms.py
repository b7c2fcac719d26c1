"""Transforms of steps that write GGUF files: what llama.cpp keeps in another form than every other
engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import array_of, bytes_of, converting, quality
from mtp_kernels.sizes import LatentSizes

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats

_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Widen:
    """Elements of bf16 or fp16 as float32, which holds them exactly."""

    name: ClassVar[str] = "widen_f32"
    uses_torch: ClassVar[bool] = False

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the elements, block by block."""
        import numpy as np

        (stream,) = inputs
        for block in stream.blocks():
            if stream.info.dtype == DType.BF16:
                wide = np.frombuffer(block, "<u2").astype("<u4") << 16
            else:
                wide = np.frombuffer(block, "<f2").astype("<f4")
            sink(0, bytes_of(wide))
        return {}


@dataclass(frozen=True)
class SplitLatentUp:
    """Projection of the latents, by head to [nope key | value], as two tensors: the keys' [h, c, n]
    is transposed in every head, the values' is [h, v, c].

    formats are those of keys and values. Where neither they nor the source's quantize, the elements
    are unchanged. scale_rule as of a conversion.
    """

    sizes: LatentSizes
    formats: tuple[WeightFormat, WeightFormat] = (UNQUANTIZED, UNQUANTIZED)
    source: WeightFormat = UNQUANTIZED
    scale_rule: str = "minmax"

    name: ClassVar[str] = "split_latent_up"
    uses_torch: ClassVar[bool] = True

    @property
    def format(self) -> WeightFormat:
        """Format of the first output."""
        return self.formats[0]

    @property
    def converts(self) -> bool:
        """True where elements change."""
        return any(one is not UNQUANTIZED for one in (*self.formats, self.source))

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on both halves, some heads at a time (InvalidInputError for damaged values)."""
        nope, latent = self.sizes.nope, self.sizes.latent
        errors: list[ErrorStats] = []
        for start, stop in self._pieces():
            with converting(inputs[0].info, (start, stop)):
                heads = self._values(inputs, start, stop).view(-1, self._head_rows, latent)
                keys = heads[:, :nope].transpose(1, 2).reshape(-1, nope)
                values = heads[:, nope:].reshape(-1, latent)
                halves = [
                    self._stored(half.contiguous(), own, errors)
                    for half, own in zip((keys, values), self.formats, strict=True)
                ]
            for number, half in enumerate(halves):
                sink(number, bytes_of(array_of(half)))
        return quality(errors) if errors else {}

    @property
    def _head_rows(self) -> int:
        return self.sizes.nope + self.sizes.value

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row of some heads, at rows of scales too."""
        rows = self.sizes.heads * self._head_rows
        unit = math.lcm(self._head_rows, self.source.scale_rows)
        step = max(1, _PIECE_ELEMENTS // (unit * self.sizes.latent)) * unit
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def _values(self, inputs: Sequence[TensorStream], start: int, stop: int) -> torch.Tensor:
        """Return rows as they are stored, or those of codes and scales as float32 values."""
        from mtp_kernels import quantize

        codes = inputs[0].rows(start, stop)
        if len(inputs) == 1:
            return quantize.checked_values(codes) if self.converts else codes
        per_scale = self.source.scale_rows
        scale = inputs[1].rows(start // per_scale, -(-stop // per_scale))
        return quantize.checked_values(self.source.source(codes, scale))

    def _stored(
        self, values: torch.Tensor, own: WeightFormat, errors: list[ErrorStats]
    ) -> torch.Tensor:
        if not self.converts:
            return values
        tensors, error = own.quantize(values, self.scale_rule)
        errors.append(error)
        return tensors[0]
