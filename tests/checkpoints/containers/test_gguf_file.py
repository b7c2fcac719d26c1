"""GGUF files: read as the package `gguf` writes them, written as it does, and refused where they
contradict the format."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_checkpoints.containers.gguf_file import (
    file_layout,
    read_header,
    split_name,
)
from mtp_checkpoints.containers.gguf_keys import MAX_HEAD_BYTES
from mtp_checkpoints.containers.gguf_values import (
    Keys,
    Value,
    ValueType,
    boolean,
    booleans,
    f32,
    i32,
    i32s,
    text,
    texts,
    u16,
    u32,
)
from mtp_checkpoints.dtypes import DType, OutputTensor, held_shape, tensor_bytes
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.tensor_reader import TensorReader, read_rows
from mtp_checkpoints.tensors.writer import ShardWriter

gguf = pytest.importorskip("gguf")

KEYS: dict[str, Value] = {
    "general.architecture": text("deepseek2"),
    "a.count": u32(61),
    "a.split": u16(3),
    "a.signed": i32(-5),
    "a.scale": f32(0.1),
    "a.norm": boolean(True),
    "a.words": texts(["<s>", "ä", ""]),
    "a.kinds": i32s([1, -2, 3]),
    "a.flags": booleans([True, False]),
    "a.u8": Value(ValueType.UINT8, 255),
    "a.i8": Value(ValueType.INT8, -128),
    "a.i16": Value(ValueType.INT16, -300),
    "a.u64": Value(ValueType.UINT64, 2**63),
    "a.i64": Value(ValueType.INT64, -(2**62)),
    "a.f64": Value(ValueType.FLOAT64, 0.1),
}
TENSORS = [
    OutputTensor("token_embd.weight", DType.GGML_Q8_0, (3, 64)),
    OutputTensor("blk.0.attn_norm.weight", DType.F32, (5,)),
    OutputTensor("blk.0.ffn_up_exps.weight", DType.GGML_Q4_K, (2, 3, 512)),
    OutputTensor("blk.0.attn_q.weight", DType.BF16, (3, 7)),
    OutputTensor("blk.0.attn_k.weight", DType.F16, (2, 1)),
    *(
        OutputTensor(f"blk.{n}.x.weight", dtype, (2, 256))
        for n, dtype in enumerate([dtype for dtype in DType if dtype.is_packed])
    ),
]


def data_of(tensor: OutputTensor) -> bytes:
    random = np.random.default_rng(len(tensor.name))
    return random.integers(0, 256, tensor.size_bytes, np.uint8).tobytes()


def write_ours(path: Path, keys: Keys, tensors: list[OutputTensor]) -> None:
    layout = file_layout(keys, tensors)
    with DiskQueue(1) as queue:
        writer = ShardWriter(path, layout, queue)
        for tensor in reversed(tensors):
            writer.write(tensor.name, memoryview(data_of(tensor)))
        writer.commit()


def write_theirs(path: Path, keys: Keys, tensors: list[OutputTensor]) -> None:
    """Write the same file with the package `gguf`."""
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in list(keys.items())[1:]:
        kind = gguf.GGUFValueType(int(value.type))
        if value.is_array:
            writer.add_key_value(key, list(value.data), gguf.GGUFValueType.ARRAY, kind)  # type: ignore[arg-type]
        else:
            writer.add_key_value(key, value.data, kind)
    for tensor in tensors:
        name = tensor.dtype.removeprefix("GGML_")
        held = np.frombuffer(data_of(tensor), np.uint8)
        shape = held_shape(tensor.dtype, tensor.shape)
        width = tensor.size_bytes // int(np.prod(shape))
        array = held.view({1: np.uint8, 2: np.float16, 4: np.float32}[width]).reshape(shape)
        if tensor.dtype is DType.BF16:
            array = held.reshape(*shape[:-1], -1)
        writer.add_tensor(tensor.name, array, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_are_those_that_the_package_writes(tmp_path: Path) -> None:
    write_ours(tmp_path / "ours.gguf", KEYS, TENSORS)
    write_theirs(tmp_path / "theirs.gguf", KEYS, TENSORS)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_reads_what_it_writes(alignment: int, tmp_path: Path) -> None:
    keys = {**KEYS, "general.alignment": u32(alignment)}
    write_ours(tmp_path / "a.gguf", keys, TENSORS)
    header = read_header(LocalFolder(tmp_path).file("a.gguf"))
    assert [(one.name, one.dtype, one.shape) for one in header.shard.tensors] == TENSORS
    assert header.keys.keys() == keys.keys()
    found = {**header.keys, "a.scale": header.keys["a.scale"]._replace(data=0.1)}
    assert found == keys
    assert header.keys["a.scale"].data == np.float32(0.1)
    for tensor in header.shard.tensors:
        assert tensor.offset_bytes % alignment == 0
        written = data_of(OutputTensor(tensor.name, tensor.dtype, tensor.shape))
        if tensor.dtype.is_opaque:
            with pytest.raises(KeyError):  # nothing takes its bytes for anything
                read_rows(tensor, 0, tensor.shape[0])
            continue
        rows = read_rows(tensor, 0, tensor.shape[0])
        assert rows.shape == held_shape(tensor.dtype, tensor.shape)
        assert bytes(rows.view(torch.uint8).numpy()) == written
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    offsets = {tensor.name: tensor.data_offset for tensor in theirs.tensors}
    assert offsets == {tensor.name: tensor.offset_bytes for tensor in header.shard.tensors}


def test_columns_of_blocks_are_read_alone(tmp_path: Path) -> None:
    write_ours(tmp_path / "a.gguf", KEYS, TENSORS)
    table = read_header(LocalFolder(tmp_path).file("a.gguf")).shard.tensors[0]
    with TensorReader(table) as reader:
        window = reader.window(range(1, 3), range(32, 64))
    assert window.tolist() == read_rows(table, 1, 3)[:, 34:].tolist()


def string(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def start(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def described(name: str = "a", shape: tuple[int, ...] = (8,), kind: int = 0, at: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, at)


def padded(head: bytes, data_bytes: int = 0, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment + data_bytes)


def key(kind: int, raw: bytes, name: str = "k") -> bytes:
    return string(name) + struct.pack("<I", kind) + raw


ARRAY = int(ValueType.ARRAY)
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends inside its start"),
    "another format": (b"PK\3\4" + bytes(60), "does not start as GGUF"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    "version 1": (start(0, 0, version=1), "version that llama.cpp does not read"),
    "version 4": (start(0, 0, version=4), "version 4"),
    "big-endian": (start(0, 0, version=3 << 24), "another byte order"),
    "head cut": (start(0, 0)[:20], "ends inside the number of its keys"),
    "more tensors than bytes": (padded(start(2**40, 0), 64), "ends inside the list of its"),
    "2^64 - 1 tensors": (padded(start(2**64 - 1, 0), 64), "ends inside the list of its"),
    "2^64 - 1 keys": (padded(start(0, 2**64 - 1), 64), "ends inside the list of its"),
    "a key's name of 2^63 bytes": (
        padded(start(0, 1) + struct.pack("<Q", 2**63), 64),
        "ends inside the name of a key",
    ),
    "a key without a name": (padded(start(0, 1) + key(0, b"\1", ""), 64), "without a plain name"),
    "a name that does not print": (padded(start(0, 1) + key(0, b"\1", "a\0"), 64), "plain name"),
    "a name that is no text": (
        padded(start(0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(20), 64),
        "no UTF-8 in the name of a key",
    ),
    "a key twice": (padded(start(0, 2) + key(0, b"\1") + key(0, b"\1"), 64), "a key twice"),
    "a value of type 13": (padded(start(0, 1) + key(13, b"\1"), 64), "unknown type"),
    "a text longer than the file": (
        padded(start(0, 1) + key(8, struct.pack("<Q", 2**62)), 64),
        "ends inside key k",
    ),
    "an array longer than the file": (
        padded(start(0, 1) + key(ARRAY, struct.pack("<IQ", 10, 2**61)), 64),
        "ends inside key k",
    ),
    "an array of 2^64 - 1 texts": (
        padded(start(0, 1) + key(ARRAY, struct.pack("<IQ", 8, 2**64 - 1)), 64),
        "ends inside key k",
    ),
    "an array of arrays": (
        padded(start(0, 1) + key(ARRAY, struct.pack("<IQ", ARRAY, 1)), 64),
        "array of arrays",
    ),
    "alignment 0": (padded(start(0, 1) + key(4, bytes(4), "general.alignment")), "alignment"),
    "alignment 48": (
        padded(start(0, 1) + key(4, struct.pack("<I", 48), "general.alignment")),
        "a power of two",
    ),
    "an alignment of uint64": (
        padded(start(0, 1) + key(10, struct.pack("<Q", 32), "general.alignment")),
        "as uint32",
    ),
    "an alignment beyond the file": (
        padded(start(1, 1) + key(4, struct.pack("<I", 2**31), "general.alignment") + described()),
        "truncated",
    ),
    "a tensor twice": (
        padded(start(2, 0) + described() + described(at=32), 64),
        "a tensor twice",
    ),
    "path in a name": (padded(start(1, 0) + described("a/../../b"), 32), "unsafe"),
    "a name of 64 bytes": (padded(start(1, 0) + described("a" * 64), 32), "too long for llama.cpp"),
    "five dimensions": (padded(start(1, 0) + described(shape=(1,) * 5), 32), "dimensions"),
    "2^32 - 1 dimensions": (
        padded(start(1, 0) + string("a") + struct.pack("<I", 2**32 - 1), 64),
        "dimensions",
    ),
    "a size of 2^63": (padded(start(1, 0) + described(shape=(2**63,)), 32), "be counted"),
    "sizes whose product overflows": (
        padded(start(1, 0) + described(shape=(2**32, 2**32)), 32),
        "be counted",
    ),
    "none of too many": (padded(start(1, 0) + described(shape=(2**62, 0, 4))), "be counted"),
    "type 99": (padded(start(1, 0) + described(kind=99), 32), "unknown type"),
    "type 4, which was removed": (padded(start(1, 0) + described(kind=4), 32), "unknown type"),
    "half a block": (padded(start(1, 0) + described(shape=(16, 2), kind=8), 34), "with a block"),
    "overlap": (padded(start(2, 0) + described() + described("b"), 64), "b overlaps another"),
    "a hole": (padded(start(2, 0) + described() + described("b", at=64), 96), "b leaves a hole"),
    "an offset of 2^64 - 1": (padded(start(1, 0) + described(at=2**64 - 1), 32), "a hole"),
    "tensors in another order": (
        padded(start(2, 0) + described(at=32) + described("b"), 64),
        "a hole",
    ),
    "truncated": (padded(start(1, 0) + described(), 31), "truncated"),
    "bytes of no tensor": (padded(start(1, 0) + described(), 33), "followed by bytes"),
    "bytes after no tensor": (padded(start(0, 0), 32), "followed by bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, tmp_path: Path) -> None:
    data, says = BAD[case]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(InvalidInputError, match=says) as refusal:
        read_header(LocalFolder(tmp_path).file("bad.gguf"))
    assert str(tmp_path / "bad.gguf") in str(refusal.value)
    assert len(str(refusal.value)) <= 2000


def test_a_head_may_not_fill_memory(tmp_path: Path) -> None:
    """A sparse file has bytes for any count."""
    with (tmp_path / "bad.gguf").open("wb") as file:
        file.write(start(0, 1) + key(ARRAY, struct.pack("<IQ", 8, MAX_HEAD_BYTES // 8)))
        file.truncate(1 << 40)
    with pytest.raises(InvalidInputError, match="head is too long, at key k"):
        read_header(LocalFolder(tmp_path).file("bad.gguf"))


def test_a_file_whose_last_tensor_is_not_padded(tmp_path: Path) -> None:
    """llama.cpp takes it."""
    (tmp_path / "a.gguf").write_bytes(padded(start(1, 0) + described(shape=(3,)), 12))
    (tensor,) = read_header(LocalFolder(tmp_path).file("a.gguf")).shard.tensors
    assert tensor.size_bytes == 12


def test_texts_may_hold_any_bytes(tmp_path: Path) -> None:
    raw = struct.pack("<IQQ", 8, 1, 1) + b"\xff"
    (tmp_path / "a.gguf").write_bytes(start(0, 1) + key(ARRAY, raw))
    found = read_header(LocalFolder(tmp_path).file("a.gguf")).keys
    assert found == {"k": Value(ValueType.STRING, ("�",), is_array=True)}


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(padded(start(1, 0) + described(shape=(256,), kind=15), 292))
    with pytest.raises(UnsupportedError, match=r"Found Q8_K\."):
        read_header(LocalFolder(tmp_path).file("a.gguf"))


@pytest.mark.parametrize("seed", range(4))
def test_no_byte_of_a_head_makes_anything_but_a_refusal(seed: int, tmp_path: Path) -> None:
    write_ours(tmp_path / "a.gguf", KEYS, TENSORS)
    good = (tmp_path / "a.gguf").read_bytes()
    head_bytes = min(file_layout(KEYS, TENSORS).places.values(), key=lambda p: p.start).start
    random = np.random.default_rng(seed)
    refused = 0
    for _ in range(200):
        data = bytearray(good)
        data[int(random.integers(head_bytes))] = int(random.integers(256))
        (tmp_path / "a.gguf").write_bytes(data)
        try:
            tensors = read_header(LocalFolder(tmp_path).file("a.gguf")).shard.tensors
        except MtpExportError:
            refused += 1
        else:
            assert all(one.offset_bytes + one.size_bytes <= len(data) for one in tensors)
    assert refused > 50


def test_what_no_file_holds_is_not_laid_out() -> None:
    for tensor in (
        OutputTensor("a", DType.U8, (1,)),
        OutputTensor("a" * 64, DType.F32, (1,)),
        OutputTensor("a", DType.F32, (1,) * 5),
    ):
        with pytest.raises(ValueError, match="no GGUF file holds a"):
            file_layout({}, [tensor])


def test_parts_of_split_files_have_llama_cpp_s_names() -> None:
    assert split_name("V3-Q8_0", 1, 5) == "V3-Q8_0-00001-of-00005.gguf"


def test_types_have_the_sizes_of_ggml() -> None:
    for dtype in DType:
        if dtype.is_packed:
            kind = gguf.GGMLQuantizationType[dtype.removeprefix("GGML_")]
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            assert (dtype.unit_elements, tensor_bytes(dtype, (elements,))) == (elements, size)
