"""Strict reader of safetensors headers.

It refuses whatever the format forbids, and also what the reference reader accepts (duplicate keys,
leading white space, unknown fields, unsafe names).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, repeat
from operator import attrgetter, mul
from typing import Any, NamedTuple

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.named_tuples import rows_of
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.byte_source import ByteFile, OpenFile, Place
from mtp_checkpoints.tensors.dtypes import DTYPE_BITS, tensor_bytes

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # of numpy's arrays, and of torch's operations
_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
# A header as the safetensors library writes it: its start, then tensors, each with what ends it.
_METADATA = "__metadata__"
_TEXT = r'[^"\\\x00-\x1f]*'
_USUAL_START = re.compile(rf'\{{(?:"{_METADATA}":\{{"{_TEXT}":"{_TEXT}"\}},)?')
# What it finds is written again and compared, and names are looked at together; that none of its
# parts runs on past a tensor keeps it linear in other text.
_USUAL_TENSOR = re.compile(
    r'"([^"]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]*\]),"data_offsets":\['
)
_USUAL_KIND = re.compile(r'"dtype":"(.*)","shape":\[(.*)\]')
_AS_WRITTEN = '"%s":{%s,"data_offsets":[%d,%d]}'
_TOO_MANY = 1 << 64
_INTEGERS = {int}
_MINUS_ZERO = re.compile(rb"-0\s*[],]")
_NO_SHAPE = ("has no valid shape", "sizes from 0 up")


class TensorInfo(NamedTuple):
    """A stored tensor: name, dtype, shape, and the bytes of its file that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: ByteFile
    offset_bytes: int
    size_bytes: int

    @property
    def path(self) -> Place:
        """Path of the tensor's file."""
        return self.file.path


@dataclass(frozen=True)
class ShardHeader:
    """A shard: its tensors in offset order, its size and version, the hash of its header."""

    file: ByteFile
    size_bytes: int
    version: int | str
    header_sha256: str
    tensors: tuple[TensorInfo, ...]

    @property
    def path(self) -> Place:
        """Path of the shard."""
        return self.file.path


class _HeaderError(Exception):
    """A contradiction inside a header; read_header makes an InvalidInputError of it."""

    def __init__(self, what: str, expected: object = None, found: object = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.found = what, expected, found


def read_header(file: ByteFile) -> ShardHeader:
    """Read the header of a safetensors file (format: https://huggingface.co/docs/safetensors).

    Raises InvalidInputError when anything in it contradicts the format or the file's size, IoError
    when the file cannot be read.
    """
    with closing(file.open()) as opened:
        try:
            header = _read_raw(opened)
            data = range(_LENGTH_BYTES + len(header), opened.size_bytes)
            ordered = _as_usual(file, header, data) or _checked(file, header, data)
        except _HeaderError as error:
            raise InvalidInputError(
                error.what,
                where=file.path,
                expected=error.expected,
                found=error.found,
                todo="The file is damaged or not in safetensors format: download or write it again",
            ) from None
        return ShardHeader(
            file=file,
            size_bytes=opened.size_bytes,
            version=opened.version,
            header_sha256=hashlib.sha256(header).hexdigest(),
            tensors=ordered,
        )


def _as_usual(file: ByteFile, header: bytes, data: range) -> tuple[TensorInfo, ...]:
    """Return the tensors of a header that is all that the format asks for, and written as the
    safetensors library does: ASCII without spaces, the tensors in the order of their bytes.

    It is faster than _checked, which all others are left to: none is returned.
    """
    if not header.isascii():
        return ()
    text = header.decode().rstrip(" ")
    start = _USUAL_START.match(text)
    begin = start.end() if start else 0
    entries = _USUAL_TENSOR.findall(text, begin)
    if not entries:
        return ()
    names, kinds = zip(*entries, strict=True)
    dtypes, shapes, sizes = zip(*map(_usual_kind, kinds), strict=True)
    places = [*accumulate(sizes, initial=0)]
    written = map(_AS_WRITTEN.__mod__, zip(names, kinds, places, places[1:], strict=False))
    body, own = text[begin:], set(names)
    if body != ",".join(written) + "}" or places[-1] != len(data):
        return ()
    are_plain = _are_plain(own) and _METADATA not in own and "\\" not in body
    if len(own) < len(names) or not are_plain:
        return ()
    offsets = accumulate(sizes, initial=data.start)
    rows = rows_of(
        TensorInfo,
        name=names,
        dtype=dtypes,
        shape=shapes,
        file=repeat(file),
        offset_bytes=offsets,
        size_bytes=sizes,
    )
    return tuple(rows)


@lru_cache(maxsize=1 << 12)  # a model of 100,000 tensors has tens of kinds
def _usual_kind(kind: str) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and bytes of a tensor; too many bytes where they are wrong."""
    match = _USUAL_KIND.fullmatch(kind)
    assert match is not None, "as it was found"
    dtype, sizes = match.groups()
    try:
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        as_written = ",".join(map(str, shape)) == sizes
        if as_written and dtype in DTYPE_BITS and _problem_of(shape) is None:
            return dtype, shape, tensor_bytes(dtype, shape)
    except ValueError:  # no number, or part of a byte
        pass
    return dtype, (), _TOO_MANY


def _checked(file: ByteFile, header: bytes, data: range) -> tuple[TensorInfo, ...]:
    """Return the tensors of any header in offset order (_HeaderError)."""
    entries = _parse_json(header)
    _check_names(entries.keys())
    tensors = [_tensor(file, name, entry, data.start) for name, entry in entries.items()]
    return _check_coverage(tensors, data.start, data.stop)


def _read_raw(file: OpenFile) -> bytes:
    """Read the header's bytes, whose number the first eight bytes tell."""
    if file.size_bytes < _LENGTH_BYTES:
        raise _HeaderError(
            "A shard is too short for a safetensors file",
            "at least 8 bytes",
            f"{file.size_bytes} bytes",
        )
    header_bytes = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    available = file.size_bytes - _LENGTH_BYTES
    if header_bytes > available:
        raise _HeaderError(
            "A shard's header is longer than the file",
            f"at most {available} bytes of header",
            f"a header length of {header_bytes}",
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise _HeaderError(
            "A shard's header is too long", f"at most {MAX_HEADER_BYTES} bytes", str(header_bytes)
        )
    return file.read(_LENGTH_BYTES, _LENGTH_BYTES + header_bytes)


def _parse_json(raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise _HeaderError("A shard's header does not start with '{'", "'{'", repr(raw[:1]))
    try:
        entries = strict_json.parse(raw)
        if _MINUS_ZERO.search(raw):
            entries = json.loads(raw, parse_int=_as_reference_reader)
    except strict_json.DuplicateKeyError as error:
        raise _HeaderError(
            "A shard's header has a duplicate key", "each key once", repr(error.args[0])
        ) from None
    except ValueError as error:
        raise _HeaderError(
            "A shard's header is not JSON", "one JSON object", str(error)[:200]
        ) from None
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _HeaderError(
            "A shard's metadata is not strings", "string values", repr(metadata)[:120]
        )
    assert isinstance(entries, dict)
    return entries


def _as_reference_reader(digits: str) -> int | float:
    """Return a whole number; the reference reader takes -0 for a fraction, which is no size."""
    return float(digits) if digits == "-0" else int(digits)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_sizes(one: object, other: object) -> bool:
    return type(one) is type(other) is int and 0 <= one < 2**63 and 0 <= other < 2**63


def _are_plain(names: Set[str]) -> bool:
    """Return whether no name is out of the ordinary, which takes no time: they are looked at
    together."""
    together = "".join(names)
    return together.isprintable() and "/" not in together and names.isdisjoint(("", ".."))


def _check_names(names: Set[str]) -> None:
    """Refuse unsafe names."""
    if _are_plain(names):
        return
    for name in names:
        try:
            check_tensor_name(name)
        except ValueError:
            raise _HeaderError("A tensor's name is unsafe", "a plain name", repr(name)) from None


def check_tensor_name(name: str) -> None:
    """Refuse a name that could lead out of a folder or does not print (ValueError)."""
    if not name or name.startswith("/") or not name.isprintable() or ".." in name.split("/"):
        raise ValueError(f"unsafe tensor name {name!r}")


def _tensor(file: ByteFile, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _HeaderError(
            f"Tensor {name} is not described as the format requires",
            "exactly dtype, shape and data_offsets",
            repr(entry)[:120],
        )
    dtype, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _HeaderError(
            f"Tensor {name} has an unknown dtype", ", ".join(DTYPE_BITS), repr(dtype)[:120]
        )
    shape = _checked_shape(name, sizes)
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(*offsets):
        raise _HeaderError(f"Tensor {name} has no valid offsets", "two sizes", repr(offsets)[:120])
    start, end = offsets
    try:
        expected_bytes = tensor_bytes(dtype, shape)
    except ValueError as error:
        raise _HeaderError(f"Tensor {name} ends inside a byte", "whole bytes", str(error)) from None
    if end - start != expected_bytes:
        raise _HeaderError(
            f"Tensor {name} has the wrong size for {dtype} {sizes}",
            f"{expected_bytes} bytes",
            f"{end - start} bytes (offsets {start} to {end})",
        )
    return TensorInfo(name, dtype, shape, file, data_start + start, expected_bytes)


def _checked_shape(name: str, sizes: object) -> tuple[int, ...]:
    """Return a shape (_HeaderError for what is none, or is beyond what programs can count)."""
    if not isinstance(sizes, list) or not _INTEGERS.issuperset(map(type, sizes)):
        problem, expected = _NO_SHAPE
    else:
        shape = tuple(sizes)
        found = _problem_of(shape)
        if found is None:
            return shape
        problem, expected = found
    raise _HeaderError(f"Tensor {name} {problem}", expected, repr(sizes)[:120])


@lru_cache(maxsize=1 << 12)  # a model of 100,000 tensors has tens of shapes
def _problem_of(shape: tuple[int, ...]) -> tuple[str, str] | None:
    """Return what is wrong with a shape, and what was expected; None for a good one."""
    if not all(map(_is_size, shape[: MAX_DIMENSIONS + 1])):
        return _NO_SHAPE
    if len(shape) > MAX_DIMENSIONS:
        return "has too many dimensions", f"at most {MAX_DIMENSIONS}"
    if not all(map(_is_size, accumulate(shape, mul))):
        return "has more elements than can be counted", "fewer than 2^63"
    return None


_by_place = attrgetter("offset_bytes", "size_bytes")


def _check_coverage(
    tensors: Sequence[TensorInfo], data_start: int, size_bytes: int
) -> tuple[TensorInfo, ...]:
    """Return the tensors in offset order, when they fill the data without hole, overlap or rest."""
    ordered = tuple(sorted(tensors, key=_by_place))
    position = data_start
    for tensor in ordered:
        if tensor.offset_bytes != position:
            kind = "overlaps another" if tensor.offset_bytes < position else "leaves a hole before"
            raise _HeaderError(
                f"Tensor {tensor.name} {kind}",
                f"data offset {position - data_start}",
                f"data offset {tensor.offset_bytes - data_start}",
            )
        position += tensor.size_bytes
    if position != size_bytes:
        kind = "truncated" if size_bytes < position else "followed by bytes of no tensor"
        raise _HeaderError(
            f"A shard is {kind}", f"{position} bytes by its header", f"{size_bytes} bytes"
        )
    return ordered
