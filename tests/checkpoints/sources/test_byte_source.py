"""Byte sources: a checkpoint that lies in no folder is read through the protocol alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources.addresses import byte_source, download_command, place_of
from mtp_checkpoints.sources.byte_source import (
    Address,
    ByteFile,
    ByteSource,
    OpenFile,
    local_path,
)
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.reader import Checkpoint


class OpenBytes:
    """Bytes in memory as an open file."""

    version = 7

    def __init__(self, data: bytes) -> None:
        self._data, self.size_bytes = data, len(data)

    def read(self, start: int, end: int) -> bytes:
        return self._data[start:end]

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        buffer[: end - start] = self._data[start:end]
        return slice(0, end - start)

    read_cached = read_into

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class MemoryFile:
    """A file of a MemorySource."""

    path: Path
    data: bytes
    sha256: None = None

    def open(self, once: range | None = None) -> OpenFile:
        return OpenBytes(self.data)


class MemorySource:
    """The files of a folder, kept in memory under a path that does not exist."""

    path = Path("/nowhere/model")
    origin: dict[str, str] = {}
    readers = 3

    def __init__(self, folder: Path) -> None:
        self._files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def names(self, folder: str = "") -> frozenset[str]:
        return frozenset() if folder else frozenset(self._files)

    def file(self, name: str) -> ByteFile:
        return MemoryFile(self.path / name, self._files[name])

    def read(self, name: str) -> bytes:
        return self._files[name]


def test_any_source_is_read_like_a_folder(pristine: Path) -> None:
    source: ByteSource = MemorySource(pristine)
    ours, folder = Checkpoint.read_from(source), Checkpoint.read_from(LocalFolder(pristine))
    assert ours.config == folder.config
    assert [shard.header_sha256 for shard in ours.shards] == [
        shard.header_sha256 for shard in folder.shards
    ]
    assert ours.tensors.keys() == folder.tensors.keys()
    assert {shard.version for shard in ours.shards} == {7}
    for name in list(ours.tensors)[:40]:
        assert torch.equal(
            ours.tensor(name).view(torch.uint8), folder.tensor(name).view(torch.uint8)
        )


def test_a_source_names_its_files_in_errors(pristine: Path) -> None:
    source = MemorySource(pristine)
    shard = next(name for name in sorted(source.names()) if name.endswith(".safetensors"))
    source._files[shard] = source._files[shard][:-1]
    with pytest.raises(
        InvalidInputError, match=f"/nowhere/model/{shard}.*truncated|truncated.*{shard}"
    ):
        Checkpoint.read_from(source)


@pytest.mark.parametrize("scheme", ["hf", "https", "s3", "gs", "az"])
def test_addresses_that_a_source_reads(scheme: str) -> None:
    """Each has a source, which has its own words for a malformed one."""
    with pytest.raises(InvalidInputError, match="This is no address of"):
        byte_source(Address(f"{scheme}://"))


def test_a_place_is_a_folder_or_an_address() -> None:
    assert place_of("a/b") == Path("a/b")
    assert place_of("hf:/a") == Path("hf:/a")
    assert place_of("x://a") == Address("x://a")


def test_an_address_that_nothing_reads() -> None:
    with pytest.raises(UnsupportedError) as caught:
        byte_source(Address("ftp://host/model"))
    error = caught.value
    assert error.what == "Nothing here reads from such an address"
    assert (str(error.where), error.found) == ("ftp://host/model", "ftp://")
    assert str(error.expected).startswith("a folder or a GGUF file, hf://org/name[@revision]")
    assert error.todo == "Download the checkpoint first"
    with pytest.raises(UnsupportedError) as caught:
        byte_source(Address("ftp://host/s3://model"))
    assert caught.value.found == "ftp://"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(InvalidInputError) as caught:
            byte_source(tmp_path / name)
        error = caught.value
        assert error.what == "There is no checkpoint folder here"
        assert (error.where, error.todo) == (tmp_path / name, "Check the path")
    assert isinstance(byte_source(tmp_path), LocalFolder)


def test_parts_of_an_address() -> None:
    address = Address("s3://bucket/model/")
    assert str(address / "a/b") == str(Address("s3://bucket/model//") / "a/b")
    assert str(address / "a/b") == "s3://bucket/model/a/b"
    assert (address / "a/b").name == "b"


def test_only_local_files_have_a_path() -> None:
    assert local_path(Path("a")) == Path("a")
    with pytest.raises(UnsupportedError) as caught:
        local_path(Address("hf://a/b"))
    error = caught.value
    assert (error.what, str(error.where)) == ("This takes a local file or folder", "hf://a/b")
    assert str(error.todo).startswith("Download it first")


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("hf://org/name", "hf download org/name --local-dir DIR"),
        ("hf://org/name@v1/sub", "hf download org/name --revision v1 --local-dir DIR"),
        ("hf://org/name@v1", "hf download org/name --revision v1 --local-dir DIR"),
        ("s3://bucket/model", "copy s3://bucket/model to DIR"),
    ],
)
def test_the_command_that_copies_a_checkpoint(address: str, command: str) -> None:
    assert download_command(Address(address)) == command
