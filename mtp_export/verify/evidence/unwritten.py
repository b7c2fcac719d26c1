"""Files that were not written to their end: a download that broke off leaves zeros in a file of the
right size, in tensors of whatever part lies there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.restored import held
from mtp_checkpoints.sources.byte_source import OpenFile, Place
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.verify.evidence.parts import PartLayout

WRITTEN = "files written to their end"  # the item that tells of them
_LEAST_TENSORS = 3  # of zeros in a row, which no tool leaves at the end of a file by chance
_CONSTANTS = 2  # the first of a weight's tensors that may be zero: behind its codes and its scales
_STEP_BYTES = 1 << 18
_BOUNDARY_BYTES = 16  # at the end of the tensor before, which may be written in part
_TORN_BYTES = 256  # there, which are not zero by chance


@dataclass(frozen=True)
class Unwritten:
    """A file of so many bytes that is zero from one on, to the one before `stop`; the first of its
    tensors that is zero as a whole, and the names of these and of those beside them that end, or
    begin, in zeros. is_torn: so many of that are zero that no tool leaves by chance."""

    file: Place
    size: int
    start: int
    stop: int
    first: str
    tensors: frozenset[str]
    is_torn: bool


def unwritten(layouts: Sequence[PartLayout], main: str) -> tuple[Unwritten, ...]:
    """Return the files of which at least the last three tensors are zero, constants of quantized
    weights not counted, and one of them is of the part `main` or they begin inside one: whole zero
    tensors of the MTP part alone may be what a tool wrote for a layer that it lost.

    Of a sound file no more than the end is read. Raises IoError for one that cannot be read.
    """
    of_main = {
        name for layout in layouts if layout.name == main for name in layout.checkpoint.tensors
    }
    constants = {
        tensor.name
        for layout in layouts
        for weight in layout.stored.weights.values()
        for tensor in weight.tensors[_CONSTANTS:]
    }
    found = (_unwritten(tensors, constants) for tensors in _by_file(layouts))
    return tuple(
        one
        for one in found
        if one is not None and (one.is_torn or not one.tensors.isdisjoint(of_main))
    )


def holes(layouts: Iterable[PartLayout], zero: Collection[str]) -> tuple[Unwritten, ...]:
    """Return the runs of zero tensors that begin or end inside others, as a download in pieces
    leaves them. zero: the tensors of weights that are zero (IoError)."""
    found = []
    for tensors in _by_file(layouts):
        at = 0
        while at < len(tensors):
            last = at
            if tensors[at].name in zero:
                last = _zeros_end(tensors, at, zero)
                if last - at >= _LEAST_TENSORS and (one := _around(tensors, at, last)).is_torn:
                    found.append(one)
            at = max(last, at + 1)
    return tuple(found)


def _zeros_end(tensors: Sequence[TensorInfo], first: int, zero: Collection[str]) -> int:
    """Return the place behind a run of zero tensors: of those that nothing is known of, as parts
    that are carried along, the bytes tell."""
    file, last = tensors[first].file.open(), first
    try:
        while last < len(tensors) and (tensors[last].name in zero or _is_zero(file, tensors[last])):
            last += 1
    finally:
        file.close()
    return last


def _by_file(layouts: Iterable[PartLayout]) -> list[list[TensorInfo]]:
    """The tensors of each file, in their order in it."""
    found: dict[Place, list[TensorInfo]] = defaultdict(list)
    for layout in layouts:
        for tensor in layout.checkpoint.tensors.values():
            for own in held(tensor):
                found[own.path].append(own._replace(name=tensor.name))
    return [sorted(tensors, key=_offset) for tensors in found.values()]


def written_weights(layout: PartLayout, lost: frozenset[str]) -> list[WeightOnDisk]:
    """Return the weights of a part, fused experts one by one, but for those with a tensor among the
    lost ones, of which `value_checks` says that they were not written."""
    return stored_weights(layout.apart, lost)


def stored_weights(layout: PartLayout, lost: frozenset[str]) -> list[WeightOnDisk]:
    """Return the same as they are stored."""
    return [
        weight
        for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors)
        if lost.isdisjoint(tensor.name for tensor in weight.tensors)
    ]


def _offset(tensor: TensorInfo) -> int:
    return tensor.offset_bytes


def _unwritten(tensors: Sequence[TensorInfo], constants: Collection[str]) -> Unwritten | None:
    """Look at a file's tensors from its end. constants: those that tell nothing."""
    file, zeros = tensors[0].file.open(), 0
    try:
        while zeros < len(tensors) and _is_zero(file, tensors[-zeros - 1]):
            zeros += 1
    finally:
        file.close()
    if sum(one.name not in constants for one in tensors[len(tensors) - zeros :]) < _LEAST_TENSORS:
        return None
    return _around(tensors, len(tensors) - zeros, len(tensors))


def _around(tensors: Sequence[TensorInfo], first: int, last: int) -> Unwritten:
    """Look at the tensors of a file before and behind some that are zero."""
    file = tensors[0].file.open()
    start, stop = tensors[first].offset_bytes, _end(tensors[last - 1])
    names, torn = {tensor.name for tensor in tensors[first:last]}, [0, 0]
    try:
        if first:
            before = tensors[first - 1]
            torn[0] = _end(before) - _last_written(file, before)
            if torn[0] >= _BOUNDARY_BYTES:
                names.add(before.name)
                start = _end(before) - torn[0]
        if last < len(tensors):
            behind = tensors[last]
            torn[1] = _first_written(file, behind) - behind.offset_bytes
            if torn[1] >= _BOUNDARY_BYTES:
                names.add(behind.name)
                stop = behind.offset_bytes + torn[1]
    finally:
        file.close()
    size, is_torn = _end(tensors[-1]), max(torn) >= _TORN_BYTES
    path = tensors[0].path
    return Unwritten(path, size, start, stop, tensors[first].name, frozenset(names), is_torn)


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


def _first_written(file: OpenFile, tensor: TensorInfo) -> int:
    """Return the start of the bytes of a tensor behind the zeros that it begins with."""
    start, end = tensor.offset_bytes, _end(tensor)
    while start < end:
        stop = min(end, start + _STEP_BYTES)
        if written := len(bytes(file.read(start, stop)).lstrip(b"\0")):
            return stop - written
        start = stop
    return end
