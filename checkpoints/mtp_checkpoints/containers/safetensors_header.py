"""Headers of safetensors files: a strict reader, and new ones.

It refuses whatever the format forbids, and also what the reference reader accepts (duplicate keys,
leading white space, unknown fields, unsafe names).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from functools import lru_cache
from itertools import accumulate, repeat
from operator import attrgetter, mul
from typing import Any

from mtp_checkpoints.containers.base import (
    FileLayout,
    HeaderError,
    ShardHeader,
    TensorInfo,
    check_no_pointer,
    check_tensor_name,
    kind_of,
)
from mtp_checkpoints.dtypes import DType, OutputTensor, tensor_bytes
from mtp_checkpoints.named_tuples import rows_of
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.byte_source import ByteFile, OpenFile

NAME = "safetensors"
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # of numpy's arrays, and of torch's operations
_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_SAYS_FORMAT = re.compile(rf'"{_METADATA}":\{{[^{{}}]*"format":"(\w+)"'.encode())
# A header as the safetensors library writes it: its start, then tensors, each with what ends it.
_TEXT = r'[^"\\\x00-\x1f]*'
_USUAL_START = re.compile(rf'\{{(?:"{_METADATA}":\{{"{_TEXT}":"{_TEXT}"\}},)?')
# What it finds is written again and compared, and names are looked at together; that none of its
# parts runs on past a tensor keeps it linear in other text.
_USUAL_TENSOR = re.compile(
    r'"([^"]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]*\]),"data_offsets":\['
)
_USUAL_KIND = re.compile(r'"dtype":"(.*)","shape":\[(.*)\]')
_AS_WRITTEN = '"%s":{%s,"data_offsets":[%d,%d]}'
_DTYPES = {dtype.value: dtype for dtype in DType if dtype.unit_elements == 1}
_ALIGNMENT_BYTES = 8
_MINUS_ZERO = re.compile(rb"-0\s*[],]")
_NO_SHAPE = ("has no valid shape", "sizes from 0 up")


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
        except HeaderError as error:
            raise error.refusal(file, "safetensors") from None
        return ShardHeader(
            container=NAME,
            file=file,
            size_bytes=opened.size_bytes,
            version=opened.version,
            header_sha256=hashlib.sha256(header).hexdigest(),
            tensors=ordered,
            says_format=said[1].decode() if (said := _SAYS_FORMAT.search(header)) else "",
        )


def _as_usual(file: ByteFile, header: bytes, data: range) -> tuple[TensorInfo, ...]:
    """Return the tensors of a header that is all that the format asks for, and written as the
    safetensors library does: ASCII without spaces, the tensors in the order of their bytes.

    It takes a third of the time of _checked, which all others are left to: none is returned.
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
    body, unique = text[begin:], set(names)
    are_plain = _are_plain(unique) and _METADATA not in unique and "\\" not in body
    if len(unique) < len(names) or not are_plain:
        return ()
    try:
        dtypes, shapes, sizes = zip(*map(_usual_kind, kinds), strict=True)
    except ValueError:
        return ()
    places = [*accumulate(sizes, initial=0)]
    written = map(_AS_WRITTEN.__mod__, zip(names, kinds, places, places[1:], strict=False))
    if body != ",".join(written) + "}" or places[-1] != len(data):
        return ()
    return tuple(
        rows_of(
            TensorInfo,
            name=names,
            dtype=dtypes,
            shape=shapes,
            file=repeat(file),
            offset_bytes=accumulate(sizes, initial=data.start),
            size_bytes=sizes,
        )
    )


@lru_cache(maxsize=1 << 12)  # a model of 100,000 tensors has tens of kinds
def _usual_kind(text: str) -> tuple[DType, tuple[int, ...], int]:
    """Return dtype, shape and bytes of a tensor (ValueError for one that is wrong)."""
    match = _USUAL_KIND.fullmatch(text)
    assert match is not None, "as it was found"
    dtype, sizes = match.groups()
    shape = tuple(map(int, sizes.split(","))) if sizes else ()
    if ",".join(map(str, shape)) != sizes:
        raise ValueError(sizes)
    return _kind(dtype, *shape)


def _checked(file: ByteFile, header: bytes, data: range) -> tuple[TensorInfo, ...]:
    """Return the tensors of any header in offset order (HeaderError)."""
    entries = _parse_json(header)
    _check_names(entries.keys())
    return _check_coverage(_tensors(file, entries, data.start), data.start, data.stop)


def _read_raw(file: OpenFile) -> bytes:
    """Read the header's bytes, whose number the first eight bytes tell."""
    if file.size_bytes < _LENGTH_BYTES:
        raise HeaderError(
            "A shard is too short for a safetensors file",
            "at least 8 bytes",
            _bytes_of(file),
        )
    header_bytes = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    available = file.size_bytes - _LENGTH_BYTES
    check_no_pointer(file, "safetensors")
    if header_bytes > available:
        if kind := kind_of(file):
            raise HeaderError(f"A shard is {kind}", "a safetensors file", _bytes_of(file))
        raise HeaderError(
            "A shard's header is longer than the file",
            f"at most {available} bytes of header",
            f"a header length of {header_bytes}",
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise HeaderError(
            "A shard's header is too long", f"at most {MAX_HEADER_BYTES} bytes", str(header_bytes)
        )
    return file.read(_LENGTH_BYTES, _LENGTH_BYTES + header_bytes)


def _bytes_of(file: OpenFile) -> str:
    return f"{file.size_bytes} bytes"


def _parse_json(raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise HeaderError("A shard's header does not start with '{'", "'{'", repr(raw[:1]))
    try:
        entries = strict_json.parse(raw)
        if _MINUS_ZERO.search(raw):
            entries = json.loads(raw, parse_int=_as_reference_reader)
    except strict_json.DuplicateKeyError as error:
        raise HeaderError(
            "A shard's header has a duplicate key", "each key once", repr(error.args[0])
        ) from None
    except ValueError as error:
        raise HeaderError(
            "A shard's header is not JSON", "one JSON object", str(error)[:200]
        ) from None
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError(
            "A shard's metadata is not strings", "string values", repr(metadata)[:120]
        )
    assert isinstance(entries, dict)
    return entries


def _as_reference_reader(digits: str) -> int | float:
    """Return a whole number; the reference reader takes -0 for a fraction, which is no size."""
    return float(digits) if digits == "-0" else int(digits)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


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
            raise HeaderError("A tensor's name is unsafe", "a plain name", repr(name)) from None


def _tensors(file: ByteFile, entries: Mapping[str, Any], data_start: int) -> list[TensorInfo]:
    """Return the tensors that entries describe (HeaderError)."""
    tensors = []
    for name, entry in entries.items():
        if type(entry) is not dict or entry.keys() != _FIELDS:
            raise HeaderError(
                f"Tensor {name} is not described as the format requires",
                "exactly dtype, shape and data_offsets",
                repr(entry)[:120],
            )
        dtype, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(sizes) is not list:
            raise _wrong_kind(name, dtype, sizes)
        try:
            known, shape, size_bytes = _kind(dtype, *sizes)
        except (TypeError, ValueError):  # also of values that cannot be hashed
            raise _wrong_kind(name, dtype, sizes) from None
        if type(offsets) is not list or len(offsets) != 2:
            raise _wrong_offsets(name, offsets)
        start, end = offsets
        if not type(start) is type(end) is int or not 0 <= start < 2**63 or not 0 <= end < 2**63:
            raise _wrong_offsets(name, offsets)
        if end - start != size_bytes:
            raise HeaderError(
                f"Tensor {name} has the wrong size for {dtype} {sizes}",
                f"{size_bytes} bytes",
                f"{end - start} bytes (offsets {start} to {end})",
            )
        tensors.append(TensorInfo(name, known, shape, file, data_start + start, size_bytes))
    return tensors


@lru_cache(maxsize=1 << 12, typed=True)  # a model of 100,000 tensors has tens of kinds
def _kind(dtype: str, *shape: int) -> tuple[DType, tuple[int, ...], int]:
    """Return the dtype, shape and bytes of such a tensor (ValueError for one that is wrong)."""
    if dtype not in _DTYPES or _problem_of(shape) is not None:
        raise ValueError(dtype)
    known = _DTYPES[dtype]
    return known, shape, tensor_bytes(known, shape)


def _wrong_kind(name: str, dtype: Any, sizes: Any) -> HeaderError:
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return HeaderError(
            f"Tensor {name} has an unknown dtype", ", ".join(_DTYPES), repr(dtype)[:120]
        )
    problem = _problem_of(tuple(sizes)) if isinstance(sizes, list) else _NO_SHAPE
    if problem is not None:
        return HeaderError(f"Tensor {name} {problem[0]}", problem[1], repr(sizes)[:120])
    try:
        tensor_bytes(_DTYPES[dtype], tuple(sizes))
    except ValueError as error:
        return HeaderError(f"Tensor {name} ends inside a byte", "whole bytes", str(error))
    raise AssertionError(f"{dtype} {sizes} is a kind")


def _wrong_offsets(name: str, offsets: object) -> HeaderError:
    return HeaderError(f"Tensor {name} has no valid offsets", "two sizes", repr(offsets)[:120])


def _problem_of(shape: Sequence[object]) -> tuple[str, str] | None:
    """Return what is wrong with a shape, and what was expected; None for a good one."""
    if not all(map(_is_size, shape[: MAX_DIMENSIONS + 1])):
        return _NO_SHAPE
    if len(shape) > MAX_DIMENSIONS:
        return "has too many dimensions", f"at most {MAX_DIMENSIONS}"
    sizes = [size for size in shape if isinstance(size, int)]
    if not all(map(_is_size, accumulate(sizes, mul))):
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
            raise HeaderError(
                f"Tensor {tensor.name} {kind}",
                f"data offset {position - data_start}",
                f"data offset {tensor.offset_bytes - data_start}",
            )
        position += tensor.size_bytes
    if position != size_bytes:
        kind = "truncated" if size_bytes < position else "followed by bytes of no tensor"
        raise HeaderError(
            f"A shard is {kind}", f"{position} bytes by its header", f"{size_bytes} bytes"
        )
    return ordered


def file_layout(tensors: Sequence[OutputTensor]) -> FileLayout:
    """Lay out a file of tensors, one after the other in their order."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    sizes = [tensor.size_bytes for tensor in tensors]
    ends = [*accumulate(sizes, initial=0)]
    for tensor, start, end in zip(tensors, ends, ends[1:], strict=False):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT_BYTES)
    head = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
    places = {
        tensor.name: range(len(head) + start, len(head) + end)
        for tensor, start, end in zip(tensors, ends, ends[1:], strict=False)
    }
    return FileLayout(head, places, len(head) + ends[-1])
