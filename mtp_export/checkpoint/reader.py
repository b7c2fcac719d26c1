"""A checkpoint folder, checked as a whole before anything is read from it: config.json, the index
and every shard's header, each against the others. Tensors are read on demand, nothing is mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_export.checkpoint import strict_json
from mtp_export.checkpoint.files import read_failure
from mtp_export.checkpoint.header import ShardHeader, TensorInfo, read_header
from mtp_export.checkpoint.tensor_reader import TensorReader
from mtp_export.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config, and every tensor's place by name.

    files_folder holds config and tokenizer; it is the folder itself, or main/ of a bundle.
    """

    folder: Path
    config: dict[str, Any]
    config_sha256: str
    shards: tuple[ShardHeader, ...]
    files_folder: Path

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config, index and all headers, and hold them against each other.

        Raises InvalidInputError naming the file and tensor that contradict, IoError for a file
        that cannot be read.
        """
        if not folder.is_dir():
            raise InvalidInputError(
                "There is no checkpoint folder here", where=folder, todo="Check --input-dir"
            )
        raw_config = _read_bytes(folder / CONFIG_NAME)
        config = _json_object(folder / CONFIG_NAME, raw_config)
        weight_map = _weight_map(folder)
        if weight_map is None:
            _check_no_stray_shard(folder, {SINGLE_NAME})
            only = read_header(folder / SINGLE_NAME)
            return cls(folder, config, _sha256(raw_config), (only,), folder)
        shards = tuple(read_header(folder / name) for name in sorted(set(weight_map.values())))
        _check_index(folder, weight_map, shards)
        return cls(folder, config, _sha256(raw_config), shards, folder)

    @property
    def is_bundle(self) -> bool:
        """Whether main and MTP tensors lie in folders of their own."""
        return self.files_folder != self.folder

    def shard_name(self, shard: ShardHeader) -> str:
        """A shard's path below the checkpoint's folder."""
        return shard.path.relative_to(self.folder).as_posix()

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now into memory of its own (KeyError for an unknown name)."""
        info = self.tensors[name]
        with TensorReader(info) as reader:
            return reader.rows(0, info.shape[0] if info.shape else 1)


def check_readable(path: Path) -> None:
    """Refuse a file that cannot be opened (IoError)."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise read_failure(path, error) from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InvalidInputError(
            "A file that every checkpoint has is missing",
            where=path,
            todo="Point at the folder that holds config.json and the safetensors shards",
        ) from None
    except OSError as error:
        raise read_failure(path, error) from error


def _unparsable(path: Path, found: str) -> InvalidInputError:
    return InvalidInputError(
        "A JSON file cannot be parsed", where=path, found=found, todo="Download it again"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object (InvalidInputError, IoError)."""
    return _json_object(path, _read_bytes(path))


def _json_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse(raw)
    except strict_json.DuplicateKeyError as error:
        raise _unparsable(path, f"the key {error.args[0]!r} stands twice") from None
    except (ValueError, RecursionError) as error:
        raise _unparsable(path, str(error)[:200]) from None
    if not isinstance(value, dict):
        raise InvalidInputError(
            "A JSON file holds no object", where=path, expected="{...}", found=type(value).__name__
        )
    return value


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The index's tensor -> file map, None for a single model.safetensors without an index."""
    path = folder / INDEX_NAME
    if not path.exists():
        if (folder / SINGLE_NAME).exists():
            return None
        raise InvalidInputError(
            "The folder has neither an index nor a single safetensors file",
            where=folder,
            expected=f"{INDEX_NAME} or {SINGLE_NAME}",
            todo="Point at a checkpoint in safetensors format",
        )
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(
            "The index has no weight_map", where=path, expected="tensor name -> file name"
        )
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_file_name(file_name):
            raise InvalidInputError(
                f"The index sends tensor {name} to a path outside the folder",
                where=path,
                expected="a plain *.safetensors file name",
                found=repr(file_name)[:200],
                todo="Do not trust this checkpoint; get it again from its source",
            )
    for file_name in sorted(set(weight_map.values())):
        if not (folder / file_name).is_file():
            lost = [name for name, file in weight_map.items() if file == file_name]
            raise InvalidInputError(
                "The index names a shard that is not in the folder",
                where=folder / file_name,
                expected=f"a file that holds {len(lost)} tensors, such as {lost[0]}",
                found="no such file",
                todo="Download the missing shard",
            )
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    plain = name.isprintable() and "/" not in name and "\\" not in name
    return plain and name.endswith(".safetensors") and len(name.encode()) < 256


def _check_index(folder: Path, weight_map: dict[str, str], shards: Iterable[ShardHeader]) -> None:
    """Every index entry is in the shard it names, every tensor is in the index, none twice."""
    _check_no_stray_shard(folder, set(weight_map.values()))
    where: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            name = tensor.name
            if name in where:
                raise InvalidInputError(
                    f"Tensor {name} is in two shards",
                    where=folder,
                    found=f"{where[name]} and {shard.path.name}",
                    todo="Remove the stale shard, or write the checkpoint again",
                )
            where[name] = shard.path.name
    for name, file_name in where.items():
        if weight_map.get(name) != file_name:
            raise InvalidInputError(
                f"Tensor {name} is in a shard but the index does not say so",
                where=folder / file_name,
                expected=f"an index entry that names {file_name}",
                found=f"{weight_map[name]}" if name in weight_map else "no index entry",
                todo="A loader that follows the index would lose it: write the index again",
            )
    for name, file_name in weight_map.items():
        if name not in where:
            raise InvalidInputError(
                f"The index names tensor {name}, which its shard does not hold",
                where=folder / file_name,
                expected=f"{name} in this file",
                found="no such tensor",
                todo="Download the shard again, or write the index again",
            )


def _check_no_stray_shard(folder: Path, indexed: set[str]) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in indexed:
            raise InvalidInputError(
                "A shard lies in the folder but the index does not name it",
                where=path,
                expected="every *.safetensors file in the index",
                found=f"an index of {len(indexed)} other files",
                todo="Remove the file if it is stale; if it holds weights, write the index again",
            )
