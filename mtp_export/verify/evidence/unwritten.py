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
_TORN_BYTES = 256  # there, which are not zero by chance


@dataclass(frozen=True)
class Unwritten:
    """A file that is zero from a byte on, to the one before `stop`; the first of its tensors that
    is zero to the end of the file, and the names of these and of the one before where that ends in
    zeros. is_torn: so many of that are zero that no tool leaves by chance."""

    file: Place
    first: str
    tensors: frozenset[str]
    start: int
    stop: int
    is_torn: bool


def unwritten(layouts: Iterable[PartLayout], main: str) -> tuple[Unwritten, ...]:
    """Return the files of which at least the last three tensors are zero, and one of them is of the
    part `main` or they begin inside one: whole zero tensors of the MTP part alone may be what a
    tool wrote for a layer that it lost.

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
    return tuple(
        one
        for one in found
        if one is not None and (one.is_torn or not one.tensors.isdisjoint(of_main))
    )


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
        while zeros < len(tensors) and _is_zero(file, tensors[-zeros - 1]):
            zeros += 1
        if zeros < _LEAST_TENSORS:
            return None
        start, stop = tensors[-zeros].offset_bytes, _end(tensors[-1])
        names, torn = {tensor.name for tensor in tensors[-zeros:]}, 0
        if zeros < len(tensors):
            before = tensors[-zeros - 1]
            torn = _end(before) - _last_written(file, before)
            if torn >= _BOUNDARY_BYTES:
                names.add(before.name)
                start = _end(before) - torn
    finally:
        file.close()
    first, is_torn = tensors[-zeros].name, torn >= _TORN_BYTES
    return Unwritten(tensors[0].path, first, frozenset(names), start, stop, is_torn)


def _end(tensor: TensorInfo) -> int:
    return tensor.offset_bytes + tensor.size_bytes


def _is_zero(file: OpenFile, tensor: TensorInfo) -> bool:
    return _last_written(file, tensor) == tensor.offset_bytes


def _last_written(file: OpenFile, tensor: TensorInfo) -> int:
    """Return the end of the bytes of a tensor before the zeros that it ends in."""
    stop = _end(tensor)
    while stop > tensor.offset_bytes:
        start = max(tensor.offset_bytes, stop - _STEP_BYTES)
        if written := len(bytes(file.read(start, stop)).rstrip(b"\0")):
            return start + written
        stop = start
    return stop
