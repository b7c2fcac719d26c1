"""A stored weight as the numbers that it stands for, in row pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import read_rows
from mtp_export.schemes.storage import BLOCK, Storage
from mtp_export.schemes.stored import Stored, StoredWeight

if TYPE_CHECKING:
    import torch

PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Raw:
    """Rows of a weight as stored: codes (or the values themselves) and scales [N, groups]."""

    storage: Storage
    codes: torch.Tensor
    scale: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """float32 [N, K], or [N] of a vector (ValueError for codes or scales without sense)."""
        import torch

        from mtp_kernels import quantize

        codes, scale = self.codes, self.scale
        if scale is None:
            return codes.to(torch.float32)
        if self.storage is Storage.FP8_BLOCK:
            block = quantize.Fp8Block(codes, scale)
            return quantize.dequantize_fp8_block(block, torch.float32)[0]
        if self.storage is Storage.INT8_CHANNEL:
            return quantize.dequantize_int8_channel(
                quantize.Int8Channel(codes, scale), torch.float32
            )
        if self.storage is Storage.INT4_GROUP:
            return quantize.dequantize_int4_group(quantize.Int4Group(codes, scale), torch.float32)
        return quantize.dequantize_w4afp8(quantize.W4AFp8(codes, scale), torch.float32)

    def with_scale(self, scale: torch.Tensor) -> Raw:
        return replace(self, scale=scale)


@dataclass(frozen=True)
class WeightOnDisk:
    """A weight of the model and the tensors of a folder that hold it."""

    stored: StoredWeight
    tensors: tuple[TensorInfo, ...]

    @property
    def name(self) -> str:
        """The name of the tensor with the elements."""
        return self.tensors[0].name

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def rows(self) -> int:
        return self.stored.weight.shape[0]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Row ranges of whole fp8 blocks that cover the weight."""
        columns = self.stored.weight.shape[1] if len(self.stored.weight.shape) == 2 else 1
        step = max(1, PIECE_ELEMENTS // (BLOCK * columns)) * BLOCK
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def raw(self, start: int, stop: int) -> Raw:
        """Rows [start, stop), start at an fp8 block's. A transposed weight is read whole."""
        has_scale = self.stored.storage is not Storage.BF16
        scale = self.tensors[1] if has_scale else None
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self.stored.storage is not Storage.FP8_BLOCK:
            first, last = start, stop
        if self.stored.transposed:
            codes = _turned(self.tensors[0])[start:stop]
            scales = None if scale is None else _turned(scale)[first:last]
        else:
            codes = read_rows(self.tensors[0], start, stop)
            scales = None if scale is None else read_rows(scale, first, last)
        return Raw(self.stored.storage, codes, scales)


def _turned(tensor: TensorInfo) -> torch.Tensor:
    return read_rows(tensor, 0, tensor.shape[0]).t()


def weights_on_disk(stored: Stored, tensors: Mapping[str, TensorInfo]) -> list[WeightOnDisk]:
    """The weights of which every tensor is there in the promised dtype and shape; check files
    names the others."""
    found = []
    for one in stored.weights.values():
        infos = [tensors.get(tensor.name) for tensor in one.tensors]
        fits = all(
            info is not None and info.dtype in spec.dtypes and info.shape == spec.shape
            for info, spec in zip(infos, one.tensors, strict=True)
        )
        if fits:
            found.append(WeightOnDisk(one, tuple(info for info in infos if info is not None)))
    return found
