"""The strict reader: reads what safetensors writes, refuses what contradicts the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cases import nightly_but, write_shard
from mtp_checkpoints.containers.safetensors_header import file_layout, read_header
from mtp_checkpoints.dtypes import (
    DType,
    OutputTensor,
    dtype_name,
    torch_dtype,
)
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.tensors.writer import ShardWriter

OF_TORCH = [dtype for dtype in DType if dtype.torch_name and not dtype.is_packed]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def entry(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end], **changes}


BAD: dict[str, tuple[dict[str, Any] | str, int, str]] = {
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "hole"),
    "hole at the start": ({"a": entry(2, 4)}, 4, "hole"),
    "truncated": ({"a": entry(0, 9)}, 8, "truncated"),
    "bytes after the end": ({"a": entry(0, 4)}, 8, "followed by"),
    "size is not shape x dtype": ({"a": entry(0, 4, shape=[3])}, 4, "wrong size"),
    "negative offset": ({"a": entry(0, 4, data_offsets=[-4, 0])}, 4, "offsets"),
    "offset is a bool": ({"a": entry(0, 1, data_offsets=[False, True])}, 1, "offsets"),
    "offset overflows": ({"a": entry(0, 4, data_offsets=[0, 2**70])}, 4, "offsets"),
    "negative shape": ({"a": entry(0, 4, shape=[-2, -2])}, 4, "shape"),
    "too many dimensions": ({"a": entry(0, 1, shape=[1] * 65)}, 1, "too many dimensions"),
    "hundreds of huge dimensions": ({"a": entry(0, 1, shape=[2**62] * 250)}, 1, "dimensions"),
    "millions of dimensions": ({"a": entry(0, 1, shape=[1] * 3_000_000)}, 1, "dimensions"),
    "more elements than memory": ({"a": entry(0, 1, shape=[2**40] * 2)}, 1, "be counted"),
    "none of too many": ({"a": entry(0, 0, shape=[2**40, 2**40, 0])}, 0, "be counted"),
    "a shape of text": ({"a": entry(0, 1, shape="1")}, 1, "shape"),
    "deep nesting": ({"a": entry(0, 1, shape=json.loads("[" * 500 + "]" * 500))}, 1, "deeper"),
    "unknown dtype": ({"a": entry(0, 4, dtype="F99")}, 4, "dtype"),
    "unknown field": ({"a": entry(0, 4, more=1)}, 4, "described"),
    "not an object": ({"a": 3}, 0, "described"),
    "metadata not strings": ({"__metadata__": {"a": 1}}, 0, "metadata"),
    "path in a name": ({"a/../../b": entry(0, 4)}, 4, "unsafe"),
    "absolute name": ({"/a": entry(0, 4)}, 4, "unsafe"),
    "NUL in a name": ({"a\0b": entry(0, 4)}, 4, "unsafe"),
    "white space first": (" " + json.dumps({"a": entry(0, 4)}), 4, "start"),
    "not JSON": ("{", 0, "not JSON"),
    "a list": ("[]", 0, "start"),
    "duplicate key": (
        '{"a":' + json.dumps(entry(0, 4)) + ',"a":' + json.dumps(entry(0, 4)) + "}",
        4,
        "duplicate",
    ),
    "bits that fill no byte": ({"a": entry(0, 1, dtype="F4", shape=[3])}, 1, "inside a byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, tmp_path: Path) -> None:
    header, data_bytes, says = BAD[case]
    path = tmp_path / "bad.safetensors"
    write_shard(path, header, bytes(data_bytes))
    with pytest.raises(InvalidInputError, match=says) as refusal:
        read_header(LocalFolder(path.parent).file(path.name))
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) <= 2000


@pytest.mark.parametrize(
    "text",
    [
        *(r"\ud800", r"\udfff", r"\ud800x", r"\udc00\ud800", r"\uD83D\uD83D"),
        *(r"\ud83d\ude00", r"\\ud800", r"\u0000", r"\n", "\n", "é", "\x7f", r"\x41", ""),
    ],
)
@pytest.mark.parametrize("where", ["key", "value"])
def test_metadata_is_text_to_us_and_to_safetensors(text: str, where: str, tmp_path: Path) -> None:
    """Both readers take a shard, or both refuse it."""
    path = tmp_path / "shard.safetensors"
    pair = f'"{text}":"pt"' if where == "key" else f'"format":"{text}"'
    write_shard(
        path, '{"__metadata__":{' + pair + "}," + json.dumps({"a": entry(0, 4)})[1:], b"abcd"
    )

    def refuses(read: Callable[[], object], error: type[Exception]) -> bool:
        try:
            read()
        except error:
            return True
        return False

    def safetensors() -> None:
        with safe_open(path, framework="pt") as shard:
            shard.metadata()

    ours = refuses(lambda: read_header(LocalFolder(tmp_path).file(path.name)), InvalidInputError)
    assert ours == refuses(safetensors, SafetensorError)


def outcome(header: str | bytes, data_bytes: int, path: Path) -> object:
    """Tensors that a header is read as, or the words of its refusal."""
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    try:
        found = read_header(LocalFolder(path.parent).file(path.name))
    except InvalidInputError as error:
        return error.what, error.expected, error.found
    return [(one.name, one.dtype, one.shape, one.size_bytes) for one in found.tensors]


CHANGES = (b"", b"0", b"1", b",", b"}", b'"', b"\\", b"\xff", b"a", b"/")


@pytest.mark.parametrize("share", nightly_but([5], [1, 5]))
@pytest.mark.parametrize("metadata", ['"__metadata__":{"format":"pt"},', ""])
def test_a_space_changes_nothing(metadata: str, share: int, tmp_path: Path) -> None:
    """Of each change of a character both headers make the same, or refuse it in the same words.

    share: of the changes, of which each character has some.
    """
    entries = {"a": entry(0, 4), "b.1": entry(4, 16, dtype="F32", shape=[3])}
    entries["c"] = entry(16, 16)
    body = json.dumps(entries, separators=(",", ":"))[1:]
    good = ("{" + metadata + body).encode()
    first = outcome(good, 16, tmp_path / "good.safetensors")
    assert isinstance(first, list) and len(first) == 3
    for place in range(1, len(good)):
        for change in CHANGES[place % share :: share]:
            damaged = good[:place] + change + good[place + 1 :]
            spaced = damaged[:1] + b" " + damaged[1:]
            ours = outcome(damaged, 16, tmp_path / "damaged.safetensors")
            other = outcome(spaced, 16, tmp_path / "spaced.safetensors")
            if ours != other:
                assert "not JSON" in str(ours) and "not JSON" in str(other), damaged


def test_names_beyond_ascii_are_read(tmp_path: Path) -> None:
    header = '{"\u00e9":' + json.dumps(entry(0, 4), separators=(",", ":")) + "}"
    assert outcome(header, 4, tmp_path / "a.safetensors") == [("\u00e9", "U8", (4,), 4)]


@pytest.mark.parametrize(
    "header",
    [
        '{"a":%s}"b":%s}',
        '{"a":%s,"a":%s}',
        '{"__metadata__":%s,"b":%s}',
        '{"__metadata__":{"format":"pt","format":"pt"},"a":%s,"b":%s}',
        '{"a":%s,"b":%s},',
        '{"a":%s,,"b":%s}',
    ],
)
def test_what_is_nearly_usual_is_refused(header: str, tmp_path: Path) -> None:
    parts = [json.dumps(entry(*span), separators=(",", ":")) for span in ((0, 4), (4, 8))]
    found = outcome(header % tuple(parts), 8, tmp_path / "a.safetensors")
    assert isinstance(found, tuple), found


def test_refuses_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidInputError, match="longer than the file"):
        read_header(LocalFolder(path.parent).file(path.name))
    path.write_bytes(b"abc")
    with pytest.raises(InvalidInputError, match="too short"):
        read_header(LocalFolder(path.parent).file(path.name))


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{name}": torch.randint(0, 2, (3, 5), generator=random).to(torch_dtype(name))
        for name in OF_TORCH
        if "FNUZ" not in name and name != "F8_E8M0"
    }
    tensors["empty"] = torch.zeros(0, 4)
    tensors["scalar"] = torch.tensor(3.5)
    path = tmp_path / "good.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(LocalFolder(path.parent).file(path.name))
    assert {tensor.name for tensor in header.tensors} == tensors.keys()
    for info in header.tensors:
        rows = info.shape[0] if info.shape else 1
        with TensorReader(info) as reader:
            value = reader.rows(0, rows)
        assert value.dtype == tensors[info.name].dtype
        assert torch.equal(value.reshape(-1).view(torch.uint8), raw_bytes(tensors[info.name]))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    data=st.data(),
)
def test_safetensors_reads_what_the_writer_writes(
    shapes: list[tuple[int, ...]], data: st.DataObject, tmp_path: Path
) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(["U8", "BF16", "F32", "I64"]), min_size=6))
    tensors = [
        OutputTensor(f"tensor.{i}", DType[dtypes[i % len(dtypes)]], shape)
        for i, shape in enumerate(shapes)
    ]
    path = tmp_path / "written.safetensors"
    path.unlink(missing_ok=True)
    contents = {
        t.name: bytes((i * 7 + n) % 251 for n in range(t.size_bytes)) for i, t in enumerate(tensors)
    }
    with DiskQueue(1) as queue:
        writer = ShardWriter(path, file_layout(tensors), queue)
        for name in data.draw(st.permutations(sorted(contents))):
            raw, half = contents[name], len(contents[name]) // 2
            writer.write(name, memoryview(raw)[:half])
            writer.write(name, memoryview(raw)[half:])
        assert not path.exists()
        writer.commit()
    with safe_open(path, framework="pt") as shard:
        assert sorted(shard.keys()) == sorted(contents)
        for tensor in tensors:
            value = shard.get_tensor(tensor.name)
            assert tuple(value.shape) == tensor.shape
            assert raw_bytes(value).numpy().tobytes() == contents[tensor.name]
    assert [
        t.name
        for t in read_header(LocalFolder(path.parent).file(path.name)).tensors
        if t.size_bytes
    ] == [t.name for t in tensors if t.size_bytes]


def test_the_data_starts_aligned_and_the_mode_is_the_umask_s(tmp_path: Path) -> None:
    head = file_layout([OutputTensor("a", DType.F32, (3,))]).head
    assert len(head) % 8 == 0
    path = tmp_path / "a.safetensors"
    with DiskQueue(1) as queue:
        ShardWriter(path, file_layout([OutputTensor("a", DType.F32, (3,))]), queue).commit()
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_every_dtype_of_torch_is_known_by_its_width() -> None:
    blocks = {dtype for dtype in DType if dtype.is_packed}
    opaque = {dtype for dtype in blocks if dtype.is_opaque}
    assert {torch_dtype(dtype) for dtype in blocks - opaque} == {torch.uint8}
    narrow = {dtype: dtype.bits for dtype in DType if dtype not in {*OF_TORCH, *blocks}}
    for dtype in OF_TORCH:
        assert torch_dtype(dtype).itemsize * 8 == dtype.bits
        assert dtype_name(torch_dtype(dtype)) is dtype
    assert narrow == {DType.F4: 4, DType.F6_E2M3: 6, DType.F6_E3M2: 6}
    for dtype in opaque.union(narrow):
        with pytest.raises(KeyError):
            torch_dtype(dtype)


def test_dtypes_are_called_as_safetensors_does(tmp_path: Path) -> None:
    """Those that both it and torch can hold, by its own names."""
    known = {}
    for name in OF_TORCH:
        path = tmp_path / name
        save_file({"a": torch.zeros(8, dtype=torch.uint8).view(torch_dtype(name))}, path)
        with safe_open(path, framework="pt") as shard:
            known[shard.get_slice("a").get_dtype()] = name
    assert known == {name: name for name in OF_TORCH}


def test_arrays_have_the_width_of_their_dtypes() -> None:
    arrays = {
        dtype: np.dtype(dtype.array_name)
        for dtype in DType
        if dtype.array_name and not dtype.is_packed
    }
    assert all(8 * array.itemsize == dtype.bits for dtype, array in arrays.items())
    kinds = {dtype: array.kind for dtype, array in arrays.items()}
    assert kinds == {DType.F8_E4M3: "u", DType.F16: "f", DType.BF16: "u", DType.F32: "f"}
