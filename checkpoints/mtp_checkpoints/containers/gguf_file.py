"""GGUF files: a strict reader of their heads, and new heads.

It refuses whatever the format or llama.cpp's own reader forbids (`docs/gguf.md` of ggml, version 3;
`ggml/src/gguf.cpp`), and believes no count, length or offset before the file has bytes for it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

from mtp_checkpoints.containers.base import (
    FileLayout,
    HeaderError,
    ShardHeader,
    TensorInfo,
    check_no_pointer,
    check_tensor_name,
)
from mtp_checkpoints.containers.gguf_keys import Head, read_keys, written, written_text
from mtp_checkpoints.containers.gguf_values import Keys, Value, ValueType
from mtp_checkpoints.dtypes import DType, OutputTensor, tensor_bytes
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.sources.byte_source import ByteFile
from mtp_checkpoints.sources.gguf_model import GGUF_SUFFIX

NAME, SUFFIX = "gguf", GGUF_SUFFIX
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 63  # of a tensor, in llama.cpp
MAX_DIMENSIONS = 4
_MAGIC, _VERSION = b"GGUF", 3
_READ_VERSIONS = (2, 3)  # they differ in the byte order that they allow
_ALIGNMENT = 32
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # of a description
_DTYPES: dict[int, DType] = {
    0: DType.F32,
    1: DType.F16,
    2: DType.GGML_Q4_0,
    3: DType.GGML_Q4_1,
    6: DType.GGML_Q5_0,
    7: DType.GGML_Q5_1,
    8: DType.GGML_Q8_0,
    10: DType.GGML_Q2_K,
    11: DType.GGML_Q3_K,
    12: DType.GGML_Q4_K,
    13: DType.GGML_Q5_K,
    14: DType.GGML_Q6_K,
    16: DType.GGML_IQ2_XXS,
    17: DType.GGML_IQ2_XS,
    18: DType.GGML_IQ3_XXS,
    19: DType.GGML_IQ1_S,
    20: DType.GGML_IQ4_NL,
    21: DType.GGML_IQ3_S,
    22: DType.GGML_IQ2_S,
    23: DType.GGML_IQ4_XS,
    24: DType.I8,
    25: DType.I16,
    26: DType.I32,
    27: DType.I64,
    28: DType.F64,
    29: DType.GGML_IQ1_M,
    30: DType.BF16,
    34: DType.GGML_TQ1_0,
    35: DType.GGML_TQ2_0,
    39: DType.GGML_MXFP4,
    40: DType.GGML_NVFP4,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
# Types that ggml has, and that it computes with alone. Source: `enum ggml_type` of ggml.h.
_UNREAD = {9: "Q8_1", 15: "Q8_K"}


@dataclass(frozen=True)
class GgufHeader:
    """The head of a GGUF file: its keys, and the tensors by the names that they have in it, shapes
    with the rows' length last."""

    keys: dict[str, Value]
    shard: ShardHeader


def read_header(file: ByteFile) -> GgufHeader:
    """Read the head of a GGUF file.

    Raises InvalidInputError when anything in it contradicts the format or the file's size,
    UnsupportedError for a type of tensors that is not read, IoError when the file cannot be read.
    """
    with closing(file.open()) as opened:
        try:
            check_no_pointer(opened, "GGUF")
            head = Head(opened)
            tensor_count = _check_start(head)
            keys = dict(read_keys(head))
            alignment = _alignment(keys)
            described = [*_described(head, tensor_count)]
            tensors = tuple(_placed(file, described, head, alignment))
        except HeaderError as error:
            raise error.refusal(file, "GGUF") from None
        except _UnreadTypeError as error:
            raise _unread(file, *error.args) from None
        shard = ShardHeader(
            container=NAME,
            file=file,
            size_bytes=opened.size_bytes,
            version=opened.version,
            header_sha256=hashlib.sha256(head.taken).hexdigest(),
            tensors=tensors,
        )
    return GgufHeader(keys, shard)


class _UnreadTypeError(Exception):
    """A tensor of a type that is not read: its name, and that of the type."""


def _unread(file: ByteFile, tensor: str, type_name: str) -> UnsupportedError:
    read = (dtype.removeprefix("GGML_") for dtype in _NUMBERS)
    return UnsupportedError(
        f"Tensor {tensor} is of a type that this tool does not read",
        where=file.path,
        expected=f"one of {', '.join(read)}",
        found=type_name,
        todo="Take a file of the model in another type",
    )


def _check_start(head: Head) -> int:
    """Check magic and version, and return the number of tensors."""
    magic = bytes(head.take(len(_MAGIC), "its start"))
    if magic != _MAGIC:
        raise HeaderError("A file does not start as GGUF does", repr(_MAGIC), repr(magic))
    version = head.number("I", "its version")
    if version not in _READ_VERSIONS:
        found = "another byte order" if version and version & 0xFFFF == 0 else f"version {version}"
        raise HeaderError(
            "A GGUF file is of a version that llama.cpp does not read",
            f"version {' or '.join(map(str, _READ_VERSIONS))}, little-endian",
            found,
        )
    count: int = head.number("Q", "the number of its tensors")
    head.check_room(_LEAST_TENSOR_BYTES * count, f"the list of its {count} tensors")
    return count


def _alignment(keys: Keys) -> int:
    value = keys.get(ALIGNMENT_KEY, Value(ValueType.UINT32, _ALIGNMENT))
    size = value.data
    if value.type is not ValueType.UINT32 or not isinstance(size, int) or size.bit_count() != 1:
        raise HeaderError(
            "A GGUF file has no valid alignment", "a power of two, as uint32", repr(size)[:80]
        )
    return size


def _described(head: Head, count: int) -> Iterator[tuple[OutputTensor, int]]:
    """Yield tensors with their offsets in the data."""
    seen: set[str] = set()
    for _ in range(count):
        name = head.text("the name of a tensor")
        try:
            check_tensor_name(name)
        except ValueError:
            raise HeaderError(
                "A tensor's name is unsafe", "a plain name", repr(name)[:120]
            ) from None
        if len(name.encode()) > MAX_NAME_BYTES:
            raise HeaderError(
                "A tensor's name is too long for llama.cpp",
                f"at most {MAX_NAME_BYTES} bytes",
                name[:200],
            )
        if name in seen:
            raise HeaderError("A GGUF file has a tensor twice", "each name once", name)
        seen.add(name)
        yield _tensor(head, name), head.number("Q", f"tensor {name}")


def _tensor(head: Head, name: str) -> OutputTensor:
    what = f"tensor {name}"
    dimensions = head.number("I", what)
    if dimensions > MAX_DIMENSIONS:
        raise HeaderError(
            f"Tensor {name} has too many dimensions", f"at most {MAX_DIMENSIONS}", str(dimensions)
        )
    shape = head.numbers("Q", dimensions, what)[::-1]
    if any(size >= 2**63 for size in shape) or prod(size for size in shape if size) >= 2**63:
        raise HeaderError(
            f"Tensor {name} has more elements than can be counted",
            "fewer than 2^63",
            " x ".join(map(str, shape)),
        )
    number = head.number("I", what)
    if number in _UNREAD:
        raise _UnreadTypeError(name, _UNREAD[number])
    if number not in _DTYPES:
        raise HeaderError(f"Tensor {name} is of an unknown type", "a type of ggml", str(number))
    tensor = OutputTensor(name, _DTYPES[number], shape)
    try:
        tensor_bytes(tensor.dtype, shape)
    except ValueError as error:
        raise HeaderError(
            f"Tensor {name} has rows that do not end with a block",
            f"a multiple of {tensor.dtype.unit_elements} elements",
            str(error),
        ) from None
    return tensor


def _placed(
    file: ByteFile, described: Sequence[tuple[OutputTensor, int]], head: Head, alignment: int
) -> Iterator[TensorInfo]:
    """Yield the tensors with their places, each where the one before it ends, aligned: all else is
    refused, as llama.cpp does (HeaderError)."""
    start = _aligned(head.at, alignment)
    position = end = start if described else head.at
    for tensor, offset in described:
        if start + offset != position:
            kind = "overlaps another" if start + offset < position else "leaves a hole before it"
            raise HeaderError(
                f"Tensor {tensor.name} {kind}",
                f"data offset {position - start}",
                f"data offset {offset}",
            )
        yield TensorInfo(*tensor, file, position, tensor.size_bytes)
        end = position + tensor.size_bytes
        position = _aligned(end, alignment)
    if not end <= head.file_bytes <= _aligned(end, alignment):
        kind = "truncated" if head.file_bytes < end else "followed by bytes of no tensor"
        raise HeaderError(
            f"A GGUF file is {kind}", f"{end} bytes by its head", f"{head.file_bytes} bytes"
        )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def file_layout(keys: Keys, tensors: Sequence[OutputTensor]) -> FileLayout:
    """Lay out a file of keys and of tensors by the names that they have in it, one after the other
    in their order, each aligned as the key of alignment says.

    ValueError for a tensor that no GGUF file holds.
    """
    alignment = _alignment(keys)
    offsets, places = [], []
    position = 0
    for tensor in tensors:
        offsets.append(position)
        places.append(range(position, position + tensor.size_bytes))
        position = _aligned(position + tensor.size_bytes, alignment)
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(keys))]
    parts += [written_text(key) + written(value) for key, value in keys.items()]
    parts += [
        _description(tensor) + struct.pack("<Q", offset)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    head = b"".join(parts)
    head += bytes(_aligned(len(head), alignment) - len(head))
    return FileLayout(
        head,
        {
            tensor.name: range(len(head) + place.start, len(head) + place.stop)
            for tensor, place in zip(tensors, places, strict=True)
        },
        len(head) + position,
    )


def _description(tensor: OutputTensor) -> bytes:
    name, dtype, shape = tensor
    long = len(name.encode()) > MAX_NAME_BYTES or len(shape) > MAX_DIMENSIONS
    if dtype not in _NUMBERS or long:
        raise ValueError(f"no GGUF file holds {name}: {dtype} {list(shape)}")
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return written_text(name) + sizes + struct.pack("<I", _NUMBERS[dtype])


def split_name(name: str, number: int, count: int) -> str:
    """Return the file name of a part of a split file, numbered from 1, as llama.cpp finds it."""
    return f"{name}-{number:05d}-of-{count:05d}{SUFFIX}"
