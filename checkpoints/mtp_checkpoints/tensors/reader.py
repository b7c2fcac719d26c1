"""Reader of a whole checkpoint: config.json, the index and every shard's header, compared with each
other before a tensor is read. Tensors are read on demand, nothing is mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.sources.byte_source import ByteSource, Place, local_path
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.header import ShardHeader, TensorInfo, read_header
from mtp_checkpoints.tensors.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
# Some releases add their MTP layer in a shard of this name that the index does not list.
MTP_NAME = "mtp.safetensors"
_name_of = attrgetter("name")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config, and the place of every tensor.

    files is the source of config and tokenizer: the checkpoint's own, or that of a bundle's main/.
    unindexed are the shards that were found though the index does not name them.
    """

    path: Place
    config: dict[str, Any]
    config_sha256: str
    shards: tuple[ShardHeader, ...]
    files: ByteSource
    unindexed: tuple[str, ...] = ()

    @classmethod
    def open(cls, place: Place) -> Checkpoint:
        """Open the checkpoint at a place; raises what byte_source and read_from do."""
        return cls.read_from(byte_source(place))

    @classmethod
    def read_from(cls, source: ByteSource) -> Checkpoint:
        """Read config, index and all headers, and compare them with each other.

        Raises InvalidInputError naming the file and tensor that contradict, IoError for a file
        that cannot be read.
        """
        raw_config = source.read(CONFIG_NAME)
        config = parsed_json_object(source.path / CONFIG_NAME, raw_config)
        weight_map = _weight_map(source)
        names = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        unindexed = [MTP_NAME] if MTP_NAME in set(source.names()) - set(names) else []
        _check_no_stray_shard(source, {*names, *unindexed})
        files = [source.file(name) for name in (*names, *unindexed)]
        with ThreadPoolExecutor(source.readers) as pool:
            shards = tuple(pool.map(read_header, files))
        if weight_map is None or not _is_listed(shards, weight_map):
            files_of = _files_of(source, shards)
            if weight_map is not None:
                _check_index(source, weight_map, files_of, unindexed)
        digest = hashlib.sha256(raw_config).hexdigest()
        return cls(
            path=source.path,
            config=config,
            config_sha256=digest,
            shards=shards,
            files=source,
            unindexed=tuple(unindexed),
        )

    @property
    def folder(self) -> Path:
        """Folder of a local checkpoint."""
        return local_path(self.path)

    @property
    def is_bundle(self) -> bool:
        """True when main and MTP tensors lie in folders of their own."""
        return self.files.path != self.path

    @property
    def main_shards(self) -> tuple[ShardHeader, ...]:
        """Shards that main tensors may lie in."""
        return self.shards

    @property
    def mtp_shards(self) -> tuple[ShardHeader, ...]:
        """Shards that MTP tensors may lie in."""
        return self.shards

    @property
    def origin(self) -> Mapping[str, Any]:
        """Identity of the source beside its files."""
        return self.files.origin

    @property
    def readers(self) -> int:
        """Number of files that are best opened at once."""
        return self.files.readers

    def shard_name(self, shard: ShardHeader) -> str:
        """Return a shard's path below the checkpoint's own."""
        return str(shard.path).removeprefix(f"{self.path}/")

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, read now into memory of its own (KeyError for an unknown name)."""
        info = self.tensors[name]
        with TensorReader(info) as reader:
            return reader.rows(0, info.shape[0] if info.shape else 1)


def _unparsable(path: Place, found: str) -> InvalidInputError:
    return InvalidInputError(
        "A JSON file cannot be parsed", where=path, found=found, todo="Download it again"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a local JSON file holds (InvalidInputError, IoError)."""
    return parsed_json_object(path, LocalFolder(path.parent).read(path.name))


def parsed_json_object(path: Place, raw: bytes) -> dict[str, Any]:
    """Return the object in a JSON file's bytes (InvalidInputError naming the file)."""
    try:
        value = strict_json.parse(raw)
    except strict_json.DuplicateKeyError as error:
        raise _unparsable(path, f"the key {error.args[0]!r} twice") from None
    except ValueError as error:
        raise _unparsable(path, str(error)[:200]) from None
    if not isinstance(value, dict):
        raise InvalidInputError(
            "A JSON file holds no object", where=path, expected="{...}", found=type(value).__name__
        )
    return value


def _weight_map(source: ByteSource) -> dict[str, str] | None:
    """Return the index's map from tensor to file; None for one file without an index."""
    path, names = source.path / INDEX_NAME, source.names()
    if INDEX_NAME not in names:
        if SINGLE_NAME in names:
            return None
        raise InvalidInputError(
            "The folder has neither an index nor a single safetensors file",
            where=source.path,
            expected=f"{INDEX_NAME} or {SINGLE_NAME}",
            found=f"{len(names)} other files",
            todo="Point at a checkpoint in safetensors format",
        )
    weight_map = parsed_json_object(path, source.read(INDEX_NAME)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(
            "The index has no weight_map", where=path, expected="tensor name -> file name"
        )
    files = weight_map.values()
    if not {str}.issuperset(map(type, files)) or not all(map(_is_plain_file_name, set(files))):
        name, file_name = next(one for one in weight_map.items() if not _is_plain_file_name(one[1]))
        raise InvalidInputError(
            f"The index puts tensor {name} at a path outside the folder",
            where=path,
            expected="a plain *.safetensors file name",
            found=repr(file_name)[:200],
            todo="Do not trust this checkpoint; get it again from its source",
        )
    for file_name in sorted(set(files)):
        if file_name not in names:
            lost = [name for name, file in weight_map.items() if file == file_name]
            raise InvalidInputError(
                "The index names a shard that is not in the folder",
                where=source.path / file_name,
                expected=f"a file that holds {len(lost)} tensors, such as {lost[0]}",
                found="no such file",
                todo="Download the missing shard",
            )
    return weight_map


def _is_plain_file_name(name: object) -> bool:
    if not isinstance(name, str) or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return name.endswith(".safetensors") and len(name.encode()) < 256


def _is_listed(shards: Iterable[ShardHeader], weight_map: Mapping[str, str]) -> bool:
    """Return whether every tensor is in one shard, the index says in which, and names no other."""
    listed = 0
    for shard in shards:
        names = map(_name_of, shard.tensors)
        if not {shard.path.name}.issuperset(map(weight_map.get, names)):
            return False
        listed += len(shard.tensors)
    return listed == len(weight_map)


def _check_index(
    source: ByteSource,
    weight_map: dict[str, str],
    files_of: dict[str, str],
    unindexed: Collection[str],
) -> None:
    """Check that index and shards name the same tensors in the same files, but for the shards that
    it need not name."""
    if unindexed:
        files_of = {name: file for name, file in files_of.items() if file not in unindexed}
    if files_of == weight_map:
        return
    for name, file_name in files_of.items():
        if weight_map.get(name) != file_name:
            raise InvalidInputError(
                f"Tensor {name} is in a shard but the index does not say so",
                where=source.path / file_name,
                expected=f"an index entry that names {file_name}",
                found=f"{weight_map[name]}" if name in weight_map else "no index entry",
                todo="A loader that follows the index would lose it: write the index again",
            )
    for name, file_name in weight_map.items():
        if name not in files_of:
            raise InvalidInputError(
                f"The index names tensor {name}, which its shard does not hold",
                where=source.path / file_name,
                expected=f"{name} in this file",
                found="no such tensor",
                todo="Download the shard again, or write the index again",
            )


def _files_of(source: ByteSource, shards: Iterable[ShardHeader]) -> dict[str, str]:
    """Return the file name of every tensor (InvalidInputError for one that is in two shards)."""
    files_of: dict[str, str] = {}
    for shard in shards:
        file_name = shard.path.name
        own = dict.fromkeys([tensor.name for tensor in shard.tensors], file_name)
        if not files_of.keys().isdisjoint(own):
            name = next(name for name in own if name in files_of)
            raise InvalidInputError(
                f"Tensor {name} is in two shards",
                where=source.path,
                found=f"{files_of[name]} and {file_name}",
                todo="Remove the stale shard, or write the checkpoint again",
            )
        files_of |= own
    return files_of


def _check_no_stray_shard(source: ByteSource, indexed: set[str]) -> None:
    for name in sorted(source.names()):
        if name.endswith(".safetensors") and name not in indexed:
            raise InvalidInputError(
                "A shard lies in the folder but the index does not name it",
                where=source.path / name,
                expected="every *.safetensors file in the index",
                found=f"an index of {len(indexed)} other files",
                todo="Remove the file if it is stale; if it holds weights, write the index again",
            )
