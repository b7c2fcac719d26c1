"""Files that were not written to their end: a download that broke off leaves zeros in a file of the
right size, in tensors of whatever part lies there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.restored import held
from mtp_checkpoints.sources.byte_source import OpenFile, Place
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.verify.evidence.parts import PartLayout

_LEAST_TENSORS = 3  # of zeros in a row, which no tool leaves at the end of a file by chance
_STEP_BYTES = 1 << 18
_BOUNDARY_BYTES = 16  # at the end of the tensor before, which may be written in part


@dataclass(frozen=True)
class Unwritten:
    """A file, the first of its tensors that is zero to the end of the file, and the names of these
    and of the one before where that ends in zeros."""

    file: Place
    first: str
    tensors: frozenset[str]


def unwritten(layouts: Iterable[PartLayout], main: str) -> tuple[Unwritten, ...]:
    """Return the files of which at least the last three tensors are zero, and one of them is of the
    part `main`: zeros in the MTP part alone may be what a tool wrote for a layer that it lost.

    Of a sound file no more than the end is read. Raises IoError for one that cannot be read.
    """
    tensors: dict[Place, list[TensorInfo]] = defaultdict(list)
    of_main: set[str] = set()
    for layout in layouts:
        for tensor in layout.checkpoint.tensors.values():
            for own in held(tensor):
                tensors[own.path].append(own._replace(name=tensor.name))
        if layout.name == main:
            of_main |= layout.checkpoint.tensors.keys()
    found = (_unwritten(sorted(own, key=_offset)) for own in tensors.values())
    return tuple(one for one in found if one is not None and not one.tensors.isdisjoint(of_main))


def written_weights(layout: PartLayout, lost: frozenset[str]) -> list[WeightOnDisk]:
    """Return the weights of a part, fused experts one by one, but for those with a tensor among the
    lost ones, of which `value_checks` says that they were not written."""
    apart = layout.apart
    return [
        weight
        for weight in weights_on_disk(apart.stored, apart.checkpoint.tensors)
        if lost.isdisjoint(tensor.name for tensor in weight.tensors)
    ]


def _offset(tensor: TensorInfo) -> int:
    return tensor.offset_bytes


def _unwritten(tensors: Sequence[TensorInfo]) -> Unwritten | None:
    """Look at a file's tensors from its end."""
    file, zeros = tensors[0].file.open(), 0
    try:
        while zeros < len(tensors) and _ends_in_zeros(file, tensors[-zeros - 1]):
            zeros += 1
        if zeros < _LEAST_TENSORS:
            return None
        names = {tensor.name for tensor in tensors[-zeros:]}
        if zeros < len(tensors):
            before = tensors[-zeros - 1]
            if _ends_in_zeros(file, before, _BOUNDARY_BYTES):
                names.add(before.name)
    finally:
        file.close()
    return Unwritten(tensors[0].path, tensors[-zeros].name, frozenset(names))


def _ends_in_zeros(file: OpenFile, tensor: TensorInfo, size_bytes: int | None = None) -> bool:
    """Return whether the last bytes of a tensor, by default all, are zero."""
    stop = tensor.offset_bytes + tensor.size_bytes
    first = stop - min(tensor.size_bytes, size_bytes or tensor.size_bytes)
    while stop > first:
        start = max(first, stop - _STEP_BYTES)
        if any(file.read(start, stop)):
            return False
        stop = start
    return True
