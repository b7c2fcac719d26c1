"""Checkpoints of safetensors files, as the Hub has them: config.json, shards, and their index."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mtp_checkpoints.containers.base import (
    CONFIG_NAME,
    SINGLE_NAME,
    FileLayout,
    Opened,
    Repeated,
    ShardHeader,
    TensorInfo,
    files_of_tensors,
)
from mtp_checkpoints.containers.repeated import RepeatedTensorsError, repeated_of
from mtp_checkpoints.containers.safetensors_header import NAME, file_layout, read_header
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.signs import main_layers, mtp_modules
from mtp_checkpoints.sources.byte_source import ByteSource
from mtp_checkpoints.sources.strict_json import parsed_json_object

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Some releases add their MTP layer in a shard of this name that the index does not list; of one of
# another name its tensors tell.
MTP_NAME = "mtp.safetensors"
_NUMBERED = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.safetensors", re.ASCII)
_NAMED = 4  # files that are missing, one by one
_name_of = attrgetter("name")


@dataclass(frozen=True)
class Safetensors:
    """The container of safetensors files."""

    name: str = NAME
    title: str = f"{INDEX_NAME} or {SINGLE_NAME}"
    index_name: str = INDEX_NAME

    def probe(self, source: ByteSource) -> bool:
        names = source.names()
        return not names.isdisjoint((INDEX_NAME, SINGLE_NAME)) or bool(whole_set(names))

    def open(self, source: ByteSource) -> Opened:
        raw_config = source.read(CONFIG_NAME)
        config = parsed_json_object(source.path / CONFIG_NAME, raw_config)
        weight_map = _weight_map(source, config)
        alone = [SINGLE_NAME] if SINGLE_NAME in source.names() else whole_set(source.names())
        names = alone if weight_map is None else sorted(set(weight_map.values()))
        others = sorted(n for n in source.names() - set(names) if n.endswith(SUFFIX))
        files = [source.file(name) for name in (*names, *others)]
        with ThreadPoolExecutor(source.readers) as pool:
            shards = tuple(pool.map(read_header, files))
        repeated = tuple(
            _repeated(shards[: len(names)], shards[len(names) :], no_index=weight_map is None)
        )
        strays = _strays(shards[len(names) :], weight_map, config)
        passed_over = {*(one.name for one in repeated), *(one.path.name for one in strays)}
        shards = tuple(shard for shard in shards if shard.path.name not in passed_over)
        # Without an index, engines load every file: none is left out.
        beside = shards[len(names) :] if weight_map is not None else ()
        unindexed = [shard.path.name for shard in beside]
        _check_no_stray_shard(shards[len(names) :], config, weight_map or {}, len(names))
        if weight_map is None or not _is_listed(shards, weight_map):
            files_of = files_of_tensors(source, shards)
            if weight_map is not None:
                _check_index(source, weight_map, files_of, unindexed, config)
        digest = hashlib.sha256(raw_config).hexdigest()
        return Opened(config, digest, shards, source, tuple(unindexed), repeated, strays)

    def shard_name(self, number: int, count: int) -> str:
        """As on the Hub: model-00001-of-00163.safetensors."""
        return f"model-{number:05d}-of-{count:05d}{SUFFIX}"

    def layout(self, tensors: Sequence[OutputTensor]) -> FileLayout:
        return file_layout(tensors)

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        weight_map = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
        total = sum(tensor.size_bytes for tensors in shards.values() for tensor in tensors)
        return {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }


def whole_set(names: Collection[str]) -> list[str]:
    """Return the shards of a folder in order, by their numbers, where all of one set are there;
    none where some are missing, or there are several sets.

    vLLM's and SGLang's loaders open them without an index too; transformers does not.
    """
    sets = {match.groups() for name in names if (match := _NUMBERED.fullmatch(name)) is not None}
    if len(sets) != 1:
        return []
    ((before, count),) = sets
    every = [f"{before}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]
    return every if every and set(every).issubset(names) else []


def shards_alone(names: Collection[str]) -> str | None:
    """Return in words which shards a folder without an index has, and which are missing by their
    numbers; None where no file is one."""
    numbered = {name: match for name in names if (match := _NUMBERED.fullmatch(name)) is not None}
    if not numbered:
        return None
    first = min(numbered)
    before, count = numbered[first].groups()
    every = (f"{before}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1))
    missing = [name for name in every if name not in names]
    words = f"{first} and {len(numbered) - 1} more" if len(numbered) > 1 else first
    if not missing:
        return words
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{words}; by their numbers {missing[0]}{more} {'are' if more else 'is'} missing too"


def _weight_map(source: ByteSource, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the index's map from tensor to file; None for one file without an index. config: its
    count of layers tells MTP modules."""
    path, names = source.path / INDEX_NAME, source.names()
    if INDEX_NAME not in names:
        return None
    weight_map = parsed_json_object(path, source.read(INDEX_NAME)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(
            "The index has no weight_map", where=path, expected="tensor name -> file name"
        )
    files = weight_map.values()
    if not {str}.issuperset(map(type, files)) or not all(map(_is_plain_file_name, set(files))):
        name, file_name = next(
            entry for entry in weight_map.items() if not _is_plain_file_name(entry[1])
        )
        if isinstance(file_name, str) and _is_plain_file_name(f"{file_name}{SUFFIX}"):
            raise InvalidInputError(
                f"The index names a file of another kind for tensor {name}",
                where=path,
                expected=f"a *{SUFFIX} file",
                found=file_name,
                todo=f"It is the index of another upload: write that of the *{SUFFIX} files",
            )
        if isinstance(file_name, str) and _is_plain_file_name(file_name.removeprefix("./")):
            raise InvalidInputError(
                f"The index gives a path of the file of tensor {name}, and not its name",
                where=path,
                expected=f"{file_name.removeprefix('./')}",
                found=file_name,
                todo="Engines that compare names load no such file: write the index without ./",
            )
        raise InvalidInputError(
            f"The index puts tensor {name} at a path outside the folder",
            where=path,
            expected=f"a plain *{SUFFIX} file name",
            found=repr(file_name)[:200],
            todo="Do not trust this checkpoint; get it again from its source",
        )
    if missing := sorted(set(files) - names):
        raise _missing_shards(source, weight_map, missing, config)
    return weight_map


def _missing_shards(
    source: ByteSource,
    weight_map: Mapping[str, str],
    missing: Sequence[str],
    config: Mapping[str, Any],
) -> InvalidInputError:
    """Return the error of files that the index names and that are not there."""
    what = _described([name for name, file in weight_map.items() if file in missing], config)
    if len(missing) == 1:
        return InvalidInputError(
            "The index names a shard that is not in the folder",
            where=source.path / missing[0],
            expected=f"a file that holds {what}",
            found="no such file",
            todo="Download the missing shard",
        )
    shown = ", ".join(missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return InvalidInputError(
        f"The index names {len(missing)} shards that are not in the folder",
        where=source.path / missing[0],
        expected=f"{shown}{more}, which hold {what}",
        found="no such files",
        todo="Download the missing shards",
    )


def _described(names: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return how many tensors these are, how many of them are an MTP module's, and one of them."""
    modules = mtp_modules(names, main_layers(config))
    of_mtp = sum(len(module.tensors) for module in modules)
    count = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
    if not of_mtp:
        return f"{count}, such as {names[0]}"
    share = "all" if of_mtp == len(names) else f"{of_mtp}"
    return f"{count}, {share} of the MTP module, such as {next(iter(modules)).tensors[0]}"


def _is_plain_file_name(name: object) -> bool:
    if not isinstance(name, str) or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return name.endswith(SUFFIX) and len(name.encode()) < 256


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
    config: Mapping[str, Any],
) -> None:
    """Check that index and shards name the same tensors in the same files, but for the shards that
    it need not name."""
    if unindexed:
        files_of = {name: file for name, file in files_of.items() if file not in unindexed}
    if files_of == weight_map:
        return
    if strange := [name for name, file in files_of.items() if weight_map.get(name) != file]:
        name = strange[0]
        file_name, listed = files_of[name], weight_map.get(name, "no index entry")
        raise InvalidInputError(
            f"Tensor {name} is in a shard but the index does not say so",
            where=source.path / file_name,
            expected=f"an index entry that names {file_name}",
            found=listed + _of_several("so are", strange, config),
            todo="A loader that follows the index would lose it: write the index again",
        )
    lost = [name for name in weight_map if name not in files_of]
    raise InvalidInputError(
        f"The index names tensor {lost[0]}, which its shard does not hold",
        where=source.path / weight_map[lost[0]],
        expected=f"{lost[0]} in this file",
        found="no such tensor" + _of_several("so it is with", lost, config),
        todo="Download the shard again, or write the index again",
    )


def _of_several(words: str, names: Sequence[str], config: Mapping[str, Any]) -> str:
    return f"; {words} {_described(names, config)}" if len(names) > 1 else ""


def _repeated(
    indexed: Sequence[ShardHeader], beside: Iterable[ShardHeader], *, no_index: bool
) -> Iterator[Repeated]:
    """Yield the shards that no index names and that repeat tensors of those that it names.

    Raises as repeated_of where there is an index; else what such a shard holds is found later.
    Source: `filter_duplicate_safetensors_files` of vLLM's and SGLang's `weight_utils.py`.
    """
    listed: dict[str, TensorInfo] | None = None
    for shard in beside:
        if listed is None:
            listed = {tensor.name: tensor for one in indexed for tensor in one.tensors}
        own = [tensor for tensor in shard.tensors if tensor.name in listed]
        if not own:
            continue
        try:
            yield repeated_of(shard, [(tensor, listed[tensor.name]) for tensor in own])
        except RepeatedTensorsError:
            if not no_index:
                raise


def _strays(
    beside: Iterable[ShardHeader], weight_map: Mapping[str, str] | None, config: Mapping[str, Any]
) -> tuple[ShardHeader, ...]:
    """Return the shards that an index leaves out and that hold something else: adapters, other
    drafts, statistics of a calibration. Without an index, engines load every file."""
    if weight_map is None:
        return tuple(shard for shard in beside if not shard.tensors)
    begun = {name.partition(".")[0] for name in weight_map}
    strays = list[ShardHeader]()
    for shard in (one for one in beside if one.path.name != MTP_NAME):
        names = [tensor.name for tensor in shard.tensors]
        apart = begun.isdisjoint(name.partition(".")[0] for name in names)
        if not names or (apart and not mtp_modules(names, main_layers(config))):
            strays.append(shard)
    return tuple(strays)


def _check_no_stray_shard(
    beside: Iterable[ShardHeader],
    config: Mapping[str, Any],
    weight_map: Mapping[str, str],
    indexed: int,
) -> None:
    """Refuse shards that no index names, unless they hold MTP modules and nothing else."""
    for shard in (one for one in beside if one.path.name != MTP_NAME):
        names = [tensor.name for tensor in shard.tensors]
        if elsewhere := [name for name in names if name in weight_map]:
            raise InvalidInputError(
                "The index puts tensors of a shard in another, which does not hold them",
                where=shard.path,
                expected=f"an index that puts {_described(elsewhere, config)}, in this file",
                found=f"{weight_map[elsewhere[0]]} in the index, which does not name this file",
                todo="Write the index again, or download the files of one revision",
            )
        of_mtp = sum(len(module.tensors) for module in mtp_modules(names, main_layers(config)))
        if of_mtp < len(names):
            raise InvalidInputError(
                "A shard lies in the folder but the index does not name it",
                where=shard.path,
                expected=f"every *{SUFFIX} file in the index, or MTP modules alone in this one",
                found=f"{_described(names, config)}, and an index of {indexed} other files",
                todo="Remove the file if it is stale; if it holds weights, write the index again",
            )
