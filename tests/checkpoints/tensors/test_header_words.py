"""Refusals of headers say where, what was expected, what was found, and what to do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cases import write_shard
from mtp_checkpoints.containers.base import ShardHeader, check_tensor_name
from mtp_checkpoints.containers.safetensors_header import file_layout, read_header
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.local_folder import LocalFolder


def read(path: Path) -> ShardHeader:
    return read_header(LocalFolder(path.parent).file(path.name))


def entry(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end], **changes}


DTYPES = ", ".join(dtype for dtype in DType if not dtype.is_packed)
LONG = "x" * 500
CASES: list[tuple[dict[str, Any] | str, int, str, str, str]] = [
    # header, bytes of data, what, expected, found
    ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "Tensor b overlaps another", "data offset 4",
     "data offset 2"),
    ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "Tensor b leaves a hole before", "data offset 4",
     "data offset 6"),
    ({"b": entry(2, 4), "a": entry(0, 2), "c": entry(4, 9)}, 8, "A shard is truncated", "{9}",
     "{8}"),
    ({"a": entry(0, 4)}, 5, "A shard is followed by bytes of no tensor", "{4}", "{5}"),
    ({"a": entry(0, 4, shape=[3])}, 4, "Tensor a has the wrong size for U8 [3]", "3 bytes",
     "4 bytes (offsets 0 to 4)"),
    ({"a": entry(1, 4, shape=[4])}, 4, "Tensor a has the wrong size for U8 [4]", "4 bytes",
     "3 bytes (offsets 1 to 4)"),
    ({"a": entry(0, 4, data_offsets=[-4, 0])}, 4, "Tensor a has no valid offsets", "two sizes",
     "[-4, 0]"),
    ('{"-0,": {"dtype": "U8", "shape": [0], "data_offsets": [-0, 0]}}', 0,
     "Tensor -0, has no valid offsets", "two sizes", "[-0.0, 0]"),
    ('{"a": {"dtype": "U8", "shape": [-0 ], "data_offsets": [0, 0]}}', 0,
     "Tensor a has no valid shape", "sizes from 0 up", "[-0.0]"),
    ({"a": entry(0, 4, data_offsets=[0, 2**63])}, 4, "Tensor a has no valid offsets", "two sizes",
     f"[0, {2**63}]"),
    ({"a": entry(0, 4, data_offsets=[2**63, 0])}, 4, "Tensor a has no valid offsets", "two sizes",
     f"[{2**63}, 0]"),
    ({"a": entry(0, 4, data_offsets=[0, 2, 4])}, 4, "Tensor a has no valid offsets", "two sizes",
     "[0, 2, 4]"),
    ({"a": entry(0, 4, data_offsets=[4])}, 4, "Tensor a has no valid offsets", "two sizes", "[4]"),
    ({"a": entry(0, 4, data_offsets={"0": 4})}, 4, "Tensor a has no valid offsets", "two sizes",
     "{'0': 4}"),
    ({"a": entry(0, 4, data_offsets=[LONG, 1])}, 4, "Tensor a has no valid offsets", "two sizes",
     repr([LONG, 1])[:120]),
    ({"a": entry(0, 4, shape=[-2, -2])}, 4, "Tensor a has no valid shape", "sizes from 0 up",
     "[-2, -2]"),
    ({"a": entry(0, 4, shape=[4.0])}, 4, "Tensor a has no valid shape", "sizes from 0 up", "[4.0]"),
    ({"a": entry(0, 4, shape=4)}, 4, "Tensor a has no valid shape", "sizes from 0 up", "4"),
    ({"a": entry(0, 4, shape=LONG)}, 4, "Tensor a has no valid shape", "sizes from 0 up",
     repr(LONG)[:120]),
    ({"a": entry(0, 1, shape=[2**40] * 2)}, 1, "Tensor a has more elements than can be counted",
     "fewer than 2^63", f"[{2**40}, {2**40}]"),
    ({"a": entry(0, 1, shape=[1] * 65)}, 1, "Tensor a has too many dimensions", "at most 64",
     repr([1] * 65)[:120]),
    ({"a": entry(0, 0, shape=[1] * 64 + [-1])}, 0, "Tensor a has no valid shape", "sizes from 0 up",
     repr([1] * 64 + [-1])[:120]),
    ({"a": entry(0, 0, shape=[1] * 65 + [-1])}, 0, "Tensor a has too many dimensions", "at most 64",
     repr([1] * 65 + [-1])[:120]),
    ({"a": entry(0, 0, shape=[2**63])}, 0, "Tensor a has no valid shape", "sizes from 0 up",
     f"[{2**63}]"),
    ({"a": entry(0, 0, shape=[2**32, 2**31])}, 0, "Tensor a has more elements than can be counted",
     "fewer than 2^63", f"[{2**32}, {2**31}]"),
    ({"a": entry(0, 4, dtype="F99")}, 4, "Tensor a has an unknown dtype", DTYPES,
     "'F99'"),
    ({"a": entry(0, 4, dtype=["U8"])}, 4, "Tensor a has an unknown dtype", DTYPES,
     "['U8']"),
    ({"a": entry(0, 4, dtype=LONG)}, 4, "Tensor a has an unknown dtype", DTYPES,
     repr(LONG)[:120]),
    ({"a": entry(0, 1, dtype="F4", shape=[3])}, 1, "Tensor a ends inside a byte", "whole bytes",
     "12 bits do not fill whole bytes"),
    ({"a": 3}, 0, "Tensor a is not described as the format requires",
     "exactly dtype, shape and data_offsets", "3"),
    ({"a": {"dtype": LONG}}, 0, "Tensor a is not described as the format requires",
     "exactly dtype, shape and data_offsets", repr({"dtype": LONG})[:120]),
    ({"../a": entry(0, 4)}, 4, "A tensor's name is unsafe", "a plain name", "'../a'"),
    ({"": entry(0, 4)}, 4, "A tensor's name is unsafe", "a plain name", "''"),
    ({"..": entry(0, 4)}, 4, "A tensor's name is unsafe", "a plain name", "'..'"),
    ({"a\x7f": entry(0, 4)}, 4, "A tensor's name is unsafe", "a plain name", r"'a\x7f'"),
    ({"__metadata__": {"a": 1}}, 0, "A shard's metadata is not strings", "string values",
     "{'a': 1}"),
    ({"__metadata__": [LONG]}, 0, "A shard's metadata is not strings", "string values",
     repr([LONG])[:120]),
    ("[]", 0, "A shard's header does not start with '{'", "'{'", "b'['"),
    ("", 0, "A shard's header does not start with '{'", "'{'", "b''"),
    ('{"a":1,"a":2}', 0, "A shard's header has a duplicate key", "each key once", "'a'"),
    ("{", 0, "A shard's header is not JSON", "one JSON object", "Expecting property name enclosed"),
    ('{"a":1}x', 0, "A shard's header is not JSON", "one JSON object", "Extra data"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "data_bytes", "what", "expected", "found"),
    CASES,
    ids=[str(i) for i in range(len(CASES))],
)
def test_a_contradiction(
    header: dict[str, Any] | str,
    data_bytes: int,
    what: str,
    expected: str,
    found: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "bad.safetensors"
    write_shard(path, header, bytes(data_bytes))
    head = path.stat().st_size - data_bytes
    with pytest.raises(InvalidInputError) as refusal:
        read(path)
    error = refusal.value
    if expected == "{9}":
        expected, found = f"{head + 9} bytes by its header", f"{head + 8} bytes"
    if expected == "{4}":
        expected, found = f"{head + 4} bytes by its header", f"{head + 5} bytes"
    assert (error.what, error.expected) == (what, expected)
    exact = what != "A shard's header is not JSON"
    assert error.found == found if exact else str(error.found).startswith(found)
    assert len(str(error.found)) <= 200
    assert error.where == path
    assert str(error.todo).startswith("The file is damaged or not in safetensors format")


@pytest.mark.parametrize(
    ("raw", "what", "expected", "found"),
    [
        (b"", "A shard is too short for a safetensors file", "at least 8 bytes", "0 bytes"),
        (b"1234567", "A shard is too short for a safetensors file", "at least 8 bytes", "7 bytes"),
        (bytes(8), "A shard's header does not start with '{'", "'{'", "b''"),
        (
            (3).to_bytes(8, "little") + b"{}",
            "A shard's header is longer than the file",
            "at most 2 bytes of header",
            "a header length of 3",
        ),
        (
            b"\xff" * 8,
            "A shard's header is longer than the file",
            "at most 0 bytes of header",
            f"a header length of {2**64 - 1}",
        ),
    ],
)
def test_a_length_that_cannot_be(
    raw: bytes, what: str, expected: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(InvalidInputError) as refusal:
        read(path)
    error = refusal.value
    assert (error.what, error.expected, error.found) == (what, expected, found)


def test_a_header_may_have_a_hundred_million_bytes(tmp_path: Path) -> None:
    path, limit = tmp_path / "long.safetensors", 100_000_000
    for length, says in ((limit, "does not start"), (limit + 1, "too long")):
        with path.open("wb") as file:  # without blocks on disk
            file.write(length.to_bytes(8, "little"))
            file.truncate(8 + limit + 1)
        with pytest.raises(InvalidInputError, match=says) as refusal:
            read(path)
    assert refusal.value.expected == f"at most {limit} bytes"
    assert refusal.value.found == str(limit + 1)


def test_what_is_read_of_a_header(tmp_path: Path) -> None:
    """Tensors by their offsets, of equal ones the empty first; places in the file; its digest."""
    path = tmp_path / "good.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "last": entry(4, 8, dtype="F32", shape=[1, 1]),
        "first": entry(0, 4),
        "none": entry(4, 4),
    }
    write_shard(path, header, b"abcdefgh")
    found = read(path)
    raw = json.dumps(header).encode()
    assert [tensor.name for tensor in found.tensors] == ["first", "none", "last"]
    assert [tensor.offset_bytes for tensor in found.tensors] == [
        8 + len(raw) + offset for offset in (0, 4, 4)
    ]
    assert [tensor.size_bytes for tensor in found.tensors] == [4, 0, 4]
    assert [tensor.shape for tensor in found.tensors] == [(4,), (0,), (1, 1)]
    assert [tensor.dtype for tensor in found.tensors] == ["U8", "U8", "F32"]
    assert found.header_sha256 == hashlib.sha256(raw).hexdigest()
    assert (found.size_bytes, found.version) == (path.stat().st_size, path.stat().st_mtime_ns)
    assert found.path == path
    assert {tensor.path for tensor in found.tensors} == {path}


def test_an_empty_tensor_may_come_first(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    write_shard(
        path, {"none": entry(0, 0), "all": entry(0, 300), "last": entry(300, 301)}, bytes(301)
    )
    found = [(one.name, one.offset_bytes, one.size_bytes) for one in read(path).tensors]
    start = path.stat().st_size - 301
    assert found == [("none", start, 0), ("all", start, 300), ("last", start + 300, 1)]


# What the library would write of a tensor, but for one thing. Some readers take the first two.
NEARLY: list[tuple[str, str, str, str]] = [
    # name, dtype, shape, what is refused
    ("a", "U8", "01", "A shard's header is not JSON"),
    ("a", "U8", "1,,1", "A shard's header is not JSON"),
    ("a", "F99", "0", "Tensor a has an unknown dtype"),
    ("a", "F4", "3", "Tensor a ends inside a byte"),
    ("a", "U8", f"{2**63},0", "Tensor a has no valid shape"),
    ("a", "U8", f"{2**32},{2**31},0", "Tensor a has more elements than can be counted"),
    ("", "U8", "0", "A tensor's name is unsafe"),
    ("..", "U8", "0", "A tensor's name is unsafe"),
    ("a/../b", "U8", "0", "A tensor's name is unsafe"),
    ("a\x7f", "U8", "0", "A tensor's name is unsafe"),
]


def as_written(name: str, dtype: str, shape: str, size: int) -> str:
    return f'{{"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{size}]}}}}'


def test_headers_that_are_nearly_as_written(tmp_path: Path) -> None:
    """Their tensors take no byte, or as many as the shape seems to say."""
    path = tmp_path / "bad.safetensors"
    for name, dtype, shape, what in NEARLY:
        for size in (0, 1):
            write_shard(path, as_written(name, dtype, shape, size), bytes(size))
            with pytest.raises(InvalidInputError) as refusal:
                read(path)
            assert refusal.value.what == what


def test_padding_is_no_part_of_a_header(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    write_shard(path, as_written("a", "U8", "12", 12) + " " * 7, bytes(12))
    (tensor,) = read(path).tensors
    assert (tensor.name, tensor.shape, tensor.offset_bytes) == (
        "a",
        (12,),
        path.stat().st_size - 12,
    )


@pytest.mark.parametrize("name", ["a", "a.b-c_d", "a/b", "a..b", ".a", "..a/b", "ä", "a b"])
def test_names_that_are_safe(name: str) -> None:
    check_tensor_name(name)


@pytest.mark.parametrize("name", ["", "/a", "..", "../a", "a/..", "a/../b", "a\n", "a\x1b", "a\0"])
def test_names_that_are_not(name: str) -> None:
    with pytest.raises(ValueError, match="^unsafe tensor name"):
        check_tensor_name(name)


def test_what_is_written_of_a_header() -> None:
    """Of torch's tensors, one behind the other, from a multiple of 8 bytes on."""
    layout = file_layout([OutputTensor("a", DType.F32, (2, 3)), OutputTensor("b", DType.U8, ())])
    length = int.from_bytes(layout.head[:8], "little")
    assert json.loads(layout.head[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    }
    start = 8 + length
    assert len(layout.head) == start and start % 8 == 0 and layout.head[-1:] in (b" ", b"}")
    assert layout.places == {"a": range(start, start + 24), "b": range(start + 24, start + 25)}
    assert layout.size_bytes == start + 25
