"""Facts of a weight from one pass over its tensors: checksums, statistics, and the comparison with
the source's weight. Every byte is read once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import xxhash

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.restored import Restored
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.sources.direct_io import equal_bytes
from mtp_checkpoints.sources.disk_queue import BLOCK_BYTES, DiskQueue
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_checkpoints.weights.weight_values import WeightOnDisk, WeightStream
from mtp_export.progress import ProgressCallback
from mtp_export.verify.evidence.mlp_notes import Note, Notes
from mtp_export.verify.evidence.source_weights import is_copy, is_linked

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.formats import EncodedWeight
    from mtp_kernels.weight_statistics import Difference, WeightStatistics

_DEQUANTIZED_ELEMENTS = 1 << 21  # of a piece whose values are compared


@dataclass(frozen=True)
class AgainstSource:
    """A weight compared with its source's.

    equal: its bytes are the source's. difference: of the values, None for a copied weight. error:
    why the values cannot be decoded, else "". failure: what reading the source raised.
    """

    source: WeightOnDisk
    equal: bool = True
    difference: Difference | None = None
    error: str = ""
    failure: MtpExportError | None = None


@dataclass(frozen=True)
class WeightFacts:
    """Findings of one pass over a weight.

    checksums: xxh3_128 of its tensors by name. digest: of its codes as [N, K]. against: None where
    the source has no such weight, or there is no source. note: None of what is not looked into, or
    cannot be decoded.
    """

    weight: WeightOnDisk
    checksums: Mapping[str, str]
    digest: str
    statistics: WeightStatistics
    against: AgainstSource | None
    note: Note | None = None

    @property
    def is_zero(self) -> bool:
        """True where every value is zero."""
        return self.statistics.is_constant and self.statistics.root_mean_square == 0

    @property
    def zero_tensors(self) -> list[str]:
        """The names of its tensors whose bytes are zero, or of all where every value is."""
        tensors = self.weight.tensors
        if not self.is_zero and not self.weight.has_scales:
            return []
        return [
            tensor.name
            for tensor in tensors
            if self.is_zero or self.checksums[tensor.name] == _checksum_of_zeros(tensor.size_bytes)
        ]


@dataclass(frozen=True)
class Walker:
    """Settings of the passes over weights; computing is entered for each piece."""

    queue: DiskQueue
    computing: AbstractContextManager[Any]
    progress: ProgressCallback

    def read_weight(
        self, weight: WeightOnDisk, source: WeightOnDisk | None, notes: Notes | None = None
    ) -> WeightFacts:
        """Read a weight, and the source's beside it; notes take what is noted of it.

        Raises IoError where the weight cannot be read; a source that cannot is a finding.
        """
        from mtp_kernels.weight_statistics import WeightStatistics

        digest, statistics = xxhash.xxh3_128(), WeightStatistics()
        elements = _piece_elements(weight, source)
        with ExitStack() as opened:
            ours = opened.enter_context(WeightStream(weight, self.queue))
            comparison = None if source is None else _Comparison(ours, source)
            for start, stop in weight.pieces(elements):
                piece = ours.encoded(start, stop)
                if comparison is not None:
                    comparison.read(start, stop, self.queue, opened)
                with self.computing:
                    digest.update(_bytes(piece.codes))
                    statistics += piece.statistics()
                    if comparison is not None:
                        comparison.add(piece)
                    if notes is not None:
                        notes.add(piece)
                self.progress(weight.size_bytes * (stop - start) // weight.rows)
            codes_digest = str(digest.hexdigest())
            return WeightFacts(
                weight,
                checksums=_checksums(ours, codes_digest),
                digest=codes_digest,
                statistics=statistics,
                against=None if comparison is None else comparison.found,
                note=None if notes is None else notes.found,
            )

    def hash_tensor(self, tensor: TensorInfo) -> str:
        """Return the xxh3_128 of a tensor's bytes (IoError)."""
        digest = xxhash.xxh3_128()
        with TensorStream(tensor, self.queue) as stream:
            for block in stream.blocks():
                with self.computing:
                    digest.update(block)
                self.progress(len(block))
        return str(digest.hexdigest())


class _Comparison:
    """Comparison with a source's weight, piece by piece, until more would not change it."""

    def __init__(self, ours: WeightStream, source: WeightOnDisk) -> None:
        self.found = AgainstSource(source)
        file = ours.weight.tensors[0].file
        self._rounding = file.rounding if isinstance(file, Restored) else 0.0
        self._is_copy = is_copy(ours.weight, source) and not self._rounding
        self._ours = ours
        self._ended = self._is_copy and is_linked(ours.weight, source)
        self._theirs: WeightStream | None = None
        self._piece: EncodedWeight | None = None

    def read(self, start: int, stop: int, queue: DiskQueue, opened: ExitStack) -> None:
        """Read the source's rows of the piece that is added next."""
        if self._ended:
            return
        try:
            if self._theirs is None:
                self._theirs = opened.enter_context(WeightStream(self.found.source, queue))
                if self._is_copy and not _are_equal(self._ours.others, self._theirs.others):
                    return self._end(equal=False)
            self._piece = self._theirs.encoded(start, stop)
        except MtpExportError as failure:
            self._end(failure=failure)

    def add(self, ours: EncodedWeight) -> None:
        """Compare a piece with the source's."""
        if self._ended or self._piece is None:
            return
        if not self._is_copy:
            self._add_values(ours, self._piece)
        elif not _are_equal([ours.codes], [self._piece.codes]):
            self._end(equal=False)

    def _add_values(self, ours: EncodedWeight, theirs: EncodedWeight) -> None:
        from mtp_kernels import weight_statistics

        try:
            own, wanted = ours.dequantize(), theirs.dequantize()
            if self._rounding:
                wanted = wanted.where((own - wanted).abs() > self._rounding, own)
            more = weight_statistics.difference(wanted, own)
        except ValueError as error:
            return self._end(equal=False, difference=None, error=str(error))
        so_far = self.found.difference or weight_statistics.Difference()
        self.found = replace(
            self.found, difference=so_far + more, equal=self.found.equal and more.noise == 0
        )

    def _end(self, **found: Any) -> None:
        self.found, self._ended = replace(self.found, **found), True


def _piece_elements(weight: WeightOnDisk, source: WeightOnDisk | None) -> int:
    elements = prod(weight.stored.weight.shape)
    most = BLOCK_BYTES * elements // max(1, weight.tensors[0].size_bytes)
    if source is None or is_copy(weight, source):
        return most
    return min(most, _DEQUANTIZED_ELEMENTS)


def _checksums(ours: WeightStream, codes_digest: str) -> dict[str, str]:
    """Return the checksums of a weight's tensors as they are stored."""
    weight = ours.weight
    if weight.stored.transposed or weight.stored.format.reads_whole:
        codes_digest = _xxh3_128(ours.whole_codes)
    names = [tensor.name for tensor in weight.tensors]
    return dict(zip(names, [codes_digest, *map(_xxh3_128, ours.others)], strict=True))


@cache
def _checksum_of_zeros(size_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, size_bytes, BLOCK_BYTES):
        digest.update(bytes(min(BLOCK_BYTES, size_bytes - start)))
    return str(digest.hexdigest())


def _xxh3_128(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_128(_bytes(tensor)).hexdigest())


def _are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    pairs = zip(map(_bytes, ours), map(_bytes, theirs), strict=True)
    return all(equal_bytes(memoryview(one), memoryview(other)) for one, other in pairs)


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
