"""Containers: file formats of checkpoints. A source says where bytes are, a container what they
mean: the config, every tensor's place, and how new files are laid out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import ByteFile, ByteSource, OpenFile, Place
from mtp_checkpoints.sources.file_kinds import LFS_POINTER, MOST_TELLING, kind_of_file

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"  # of a checkpoint in one file
QUANTIZATION = "quantization_config"  # its field
COMPRESSION = "compression_config"  # the same of older compressed-tensors


def quantization_field(config: Mapping[str, Any]) -> str:
    """Return the name that a config.json's quantization_config has: vLLM and SGLang read the older
    one where there is no other."""
    is_older = config.get(QUANTIZATION) is None and config.get(COMPRESSION) is not None
    return COMPRESSION if is_older else QUANTIZATION


class TensorInfo(NamedTuple):
    """A stored tensor: name, dtype, shape, and the bytes of its file that hold it."""

    name: str
    dtype: DType
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
    """A shard: its tensors in offset order, its size and version, the hash of its header.

    container is the name of the format that it is in, says_format what its metadata say of that:
    the library that it was written for. apart are the tensors as plans have them that
    write such a file, where some of them are read as one; else none.
    """

    container: str
    file: ByteFile
    size_bytes: int
    version: int | str
    header_sha256: str
    tensors: tuple[TensorInfo, ...]
    apart: tuple[TensorInfo, ...] = ()
    says_format: str = ""

    @property
    def path(self) -> Place:
        """Path of the shard."""
        return self.file.path

    @property
    def written(self) -> tuple[TensorInfo, ...]:
        """The tensors as plans and manifests have them."""
        return self.apart or self.tensors


# A tensor of a shard that no index names, and the one of its name that another shard holds.
Pair = tuple[TensorInfo, TensorInfo]


@dataclass(frozen=True)
class Repeated:
    """A shard of which the index has every tensor in another file; compared counts those of which
    samples were compared, and are equal."""

    shard: ShardHeader
    pairs: tuple[Pair, ...]
    compared: int

    @property
    def name(self) -> str:
        """Name of the shard's file."""
        return self.shard.path.name


@dataclass(frozen=True)
class Opened:
    """Content of a checkpoint: its config, the shards, and the source of tokenizer files.

    unindexed are the shards that were found though the index leaves them out; without an index,
    none. repeated are none of the shards: the index has their tensors in others. Nor are
    strays, which no index names either: files of something else, by all their tensors' names.
    """

    config: dict[str, Any]
    config_sha256: str
    shards: tuple[ShardHeader, ...]
    files: ByteSource
    unindexed: tuple[str, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    strays: tuple[ShardHeader, ...] = ()


@dataclass(frozen=True)
class FileLayout:
    """A file to be written: the bytes that it begins with, and the place of each tensor after them.

    Bytes of no tensor are zeros.
    """

    head: bytes
    places: Mapping[str, range]
    size_bytes: int


class Container(Protocol):
    """A file format of checkpoints, read from any source and written as a stream.

    title names in messages the files that it is known by. index_name is that of the file that says
    which shard holds a tensor, where there is one.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def index_name(self) -> str | None: ...

    def probe(self, source: ByteSource) -> bool:
        """Return whether a source has files of this format, by their names."""
        ...

    def open(self, source: ByteSource) -> Opened:
        """Read config, index and all headers, and compare them with each other.

        Raises InvalidInputError naming the file and tensor that contradict, IoError for a file
        that cannot be read.
        """
        ...

    def shard_name(self, number: int, count: int) -> str:
        """Return the file name of a shard, numbered from 1."""
        ...

    def layout(self, tensors: Sequence[OutputTensor]) -> FileLayout:
        """Lay out one file, whose tensors may then be written in any order."""
        ...

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        """Return the content of the index of shards by their file names."""
        ...


class HeaderError(Exception):
    """A contradiction inside a header; its reader makes an InvalidInputError of it."""

    def __init__(self, what: str, expected: object = None, found: object = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.found = what, expected, found

    def refusal(self, file: ByteFile, title: str) -> InvalidInputError:
        """Return the refusal of a file of a format of this title."""
        return InvalidInputError(
            self.what,
            where=file.path,
            expected=self.expected,
            found=self.found,
            todo=f"The file is damaged or not in {title} format: download or write it again",
        )


def check_no_pointer(file: OpenFile, title: str) -> None:
    """Refuse the text that Git LFS leaves in place of a large file (HeaderError)."""
    if kind_of(file) == LFS_POINTER:
        raise HeaderError(
            f"A shard is {LFS_POINTER}, not the file that it stands for",
            f"a {title} file: `git lfs pull` brings it, or the Hub's own client",
            f"{file.size_bytes} bytes of text",
        )


def kind_of(file: OpenFile) -> str:
    """Return in words what an open file is by its first bytes; "" for anything that is not known
    by them."""
    return kind_of_file(file.read(0, min(MOST_TELLING, file.size_bytes)))


def check_tensor_name(name: str) -> None:
    """Refuse a name that could lead out of a folder or does not print (ValueError)."""
    if not name or name.startswith("/") or not name.isprintable() or ".." in name.split("/"):
        raise ValueError(f"unsafe tensor name {name!r}")


_COPIED = (
    "download both again where the original has both, with tensors of its own in each, else remove"
    " one"
)


def files_of_tensors(source: ByteSource, shards: Iterable[ShardHeader]) -> dict[str, str]:
    """Return the file name of every tensor (InvalidInputError for one that is in two shards)."""
    files_of: dict[str, str] = {}
    for shard in shards:
        file_name = shard.path.name
        local = dict.fromkeys([tensor.name for tensor in shard.tensors], file_name)
        if not files_of.keys().isdisjoint(local):
            name = next(name for name in local if name in files_of)
            both = sum(name in files_of for name in local)
            more = f", of {both:,} tensors that are in both" if both > 1 else ""
            copied = both == len(local) == sum(file == files_of[name] for file in files_of.values())
            raise InvalidInputError(
                f"Tensor {name} is in two shards",
                where=source.path / file_name if copied else source.path,
                found=f"{files_of[name]} and {file_name}{more}",
                todo=f"One of them is a copy of the other: {_COPIED}"
                if copied
                else "Remove the stale shard, or write the checkpoint again",
            )
        files_of |= local
    return files_of
