"""Checkpoints of GGUF files, llama.cpp's format: one model in a folder, whole or in parts, with the
file of an MTP module alone beside it or without.

Outside of it tensors have their released names and shapes: experts that a file holds together are
those of single experts, and kv_b_proj is one.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from mtp_checkpoints.containers.base import (
    CONFIG_NAME,
    QUANTIZATION,
    FileLayout,
    Opened,
    ShardHeader,
    TensorInfo,
    files_of_tensors,
)
from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURES
from mtp_checkpoints.containers.gguf_architectures.base import (
    ARCHITECTURE,
    HALVES,
    LATENT_UP,
    TEXT_CONFIG,
    TEXT_PREFIX,
    Architecture,
    Change,
    Released,
    Whole,
)
from mtp_checkpoints.containers.gguf_architectures.keys_read import TOKENS, KeyReader
from mtp_checkpoints.containers.gguf_file import NAME, SUFFIX, GgufHeader, read_header, split_name
from mtp_checkpoints.containers.gguf_forms import Form
from mtp_checkpoints.containers.gguf_values import Value, text
from mtp_checkpoints.containers.joined_halves import JoinedHalves, joined, kind_of
from mtp_checkpoints.containers.restored import Restored, held, restored
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources.byte_source import ByteSource
from mtp_checkpoints.sources.gguf_model import MTP_PREFIX, model_and_parts
from mtp_checkpoints.sources.strict_json import parsed_json_object

_PROJECTOR = "mmproj"  # of one that holds a vision tower, which no text model needs
_COUNT_KEY = "split.count"
_BLOCKS = "blk."
# Formats of what is computed of blocks, and of what cannot be.
_DECODED_BLOCKS, _OPAQUE_BLOCKS = "decoded_blocks", "opaque_blocks"
_FIRST_NORM = "blk.0.attn_norm.weight"


@dataclass(frozen=True)
class Gguf:
    """The container of GGUF files. New ones are laid out with the keys of their model, which
    targets of llama.cpp know."""

    name: str = NAME
    title: str = f"*{SUFFIX}"
    index_name: None = None

    def probe(self, source: ByteSource) -> bool:
        return any(name.endswith(SUFFIX) for name in source.names())

    def open(self, source: ByteSource) -> Opened:
        main, mtp = _models(source)
        names = [*main, *mtp]
        with ThreadPoolExecutor(source.readers) as pool:
            headers = tuple(pool.map(read_header, map(source.file, names)))
        models = [
            _Model.of(files, part)
            for files, part in ((main, headers[: len(main)]), (mtp, headers[len(main) :]))
            if files
        ]
        _check_alike(models)
        config, digest = _config(source, models)
        tower = TEXT_CONFIG in config
        named = (replace(model, beside_a_tower=tower) for model in models)
        shards = tuple(chain.from_iterable(model.shards() for model in named))
        files_of_tensors(source, shards)
        return Opened(_described(config, shards), digest, shards, source)

    def shard_name(self, number: int, count: int) -> str:
        return split_name("model", number, count)

    def layout(self, tensors: Sequence[OutputTensor]) -> FileLayout:
        raise AssertionError("a GGUF file is laid out with its keys")

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        raise AssertionError("GGUF has no index")


def _models(source: ByteSource) -> tuple[list[str], list[str]]:
    """Return the files of a model, and those of a module alone beside it, in order; where there is
    a module and nothing else, it is the model.

    Raises InvalidInputError for several models, or for parts that are missing.
    """
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in sorted(source.names()):
        if name.endswith(SUFFIX) and not name.startswith(_PROJECTOR):
            groups[model_and_parts(name)].append(name)
    modules = {key: own for key, own in groups.items() if key[0].startswith(MTP_PREFIX)}
    mains = {key: own for key, own in groups.items() if key not in modules}
    if len(mains) > 1 or len(modules) > 1 or not groups:
        found = [own[0] for own in groups.values()]
        raise InvalidInputError(
            "The folder does not hold one GGUF model",
            where=source.path,
            expected=f"the files of one model, and at most one {MTP_PREFIX}NAME{SUFFIX} beside it",
            found=f"{len(mains)} models and {len(modules)} modules: {', '.join(found[:4])}"
            if found
            else f"no *{SUFFIX} file but of a vision tower",
            todo="Point at one of the files",
        )
    for (base, count), own in groups.items():
        _check_parts(source, base, count, own)
    return next(iter(mains.values()), []), next(iter(modules.values()), [])


def _check_parts(source: ByteSource, base: str, count: int, names: Sequence[str]) -> None:
    for number in range(1, count + 1):
        name = split_name(base, number, count)
        if name not in names:
            raise InvalidInputError(
                "A part of a split GGUF file is missing",
                where=source.path / name,
                expected=f"{count} parts",
                found=f"{len(names)} of them",
                todo="Download the missing part",
            )


@dataclass(frozen=True)
class _Model:
    """A model, or a module alone, with the heads of its files; the first one's keys count."""

    headers: tuple[GgufHeader, ...]
    architecture: Architecture
    module_alone: int | None
    beside_a_tower: bool = False

    @classmethod
    def of(cls, files: Sequence[str], headers: tuple[GgufHeader, ...]) -> _Model:
        keys, place = headers[0].keys, headers[0].shard.path
        counted = keys.get(_COUNT_KEY)
        if len(files) > 1 and (counted is None or counted.data != len(files)):
            raise InvalidInputError(
                "A part of a split GGUF file does not count the parts that there are",
                where=place,
                expected=f"{_COUNT_KEY} {len(files)}",
                found="no such key" if counted is None else repr(counted.data)[:100],
                todo="Get all parts from one source",
            )
        named = keys.get(ARCHITECTURE, text("")).data
        if named not in ARCHITECTURES:
            raise UnsupportedError(
                "A GGUF file has an architecture that this tool does not read",
                where=place,
                expected=" or ".join(ARCHITECTURES),
                found=repr(named)[:100],
            )
        architecture = ARCHITECTURES[str(named)]
        model = cls(headers, architecture, None)
        modules = model.count("nextn_predict_layers", 0)
        alone = modules > 0 and _FIRST_NORM not in model.names
        return replace(model, module_alone=model.count("block_count") - modules) if alone else model

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the files."""
        tensors = (tensor for header in self.headers for tensor in header.shard.tensors)
        return frozenset(tensor.name for tensor in tensors)

    @property
    def keys(self) -> dict[str, Value]:
        return self.headers[0].keys

    @cached_property
    def mtp_layer(self) -> int | None:
        """Layer of the module; None without one."""
        modules = self.count("nextn_predict_layers", 0)
        return self.count("block_count") - modules if modules else None

    @cached_property
    def _form_of(self) -> Callable[[str], Form | None]:
        return self.architecture.form_in(self.keys, self.mtp_layer)

    @cached_property
    def _whole_of(self) -> Callable[[str], Whole | None]:
        return self.architecture.whole_in(self.keys)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of a key behind the architecture (InvalidInputError)."""
        return KeyReader(self.keys, self.architecture.name).whole(key, default)

    def shards(self) -> Iterator[ShardHeader]:
        """Yield the files with what they hold by released names; a tensor that the architecture
        does not have keeps its own (InvalidInputError)."""
        halves: dict[str, dict[Change, TensorInfo]] = defaultdict(dict)
        for header in self.headers:
            for tensor in header.shard.tensors:
                released = self._released(tensor)
                if released is not None and released.change is not None:
                    halves[released.names[0]][released.change] = tensor
        in_blocks = self._in_blocks
        for header in self.headers:
            tensors = (
                one
                for tensor in header.shard.tensors
                for one in self._tensors(tensor, halves)
                # Of a module its own copy counts before the one that its file has for it.
                if tensor.name.startswith(_BLOCKS) or one.name not in in_blocks
            )
            apart = chain.from_iterable(map(self._apart, header.shard.tensors))
            yield replace(header.shard, tensors=_once(header, tuple(tensors)), apart=tuple(apart))

    @property
    def _in_blocks(self) -> frozenset[str]:
        """Released names of what the blocks hold."""
        tensors = (tensor for header in self.headers for tensor in header.shard.tensors)
        released = (self._released(one) for one in tensors if one.name.startswith(_BLOCKS))
        return frozenset(name for one in released if one is not None for name in one.names)

    def _released(self, tensor: TensorInfo) -> Released | None:
        experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        architecture, alone = self.architecture, self.module_alone
        layer = self.mtp_layer if architecture.has_mtp_names else None
        return self._named(architecture.released(tensor.name, experts, alone, mtp_layer=layer))

    def _named(self, released: Released | None) -> Released | None:
        """Return the names that checkpoints with a vision tower have, where it is of one."""
        if released is None or not self.beside_a_tower:
            return released
        names = (name.replace("model.", TEXT_PREFIX, 1) for name in released.names)
        return released._replace(names=tuple(names))

    def _apart(self, tensor: TensorInfo) -> Iterator[TensorInfo]:
        """Yield what a tensor of a file was written of: halves are by themselves, and a module has
        the norm behind the main model."""
        released = self._released(tensor)
        if released is not None and not released.names:
            released = self._named(self.architecture.released(tensor.name))
        if released is None:
            yield tensor
        elif released.change is not None:
            half = HALVES[released.change]
            yield tensor._replace(name=released.names[0].replace(LATENT_UP, half))
        else:
            yield from _experts(tensor, released.names)

    def _tensors(
        self, tensor: TensorInfo, halves: Mapping[str, Mapping[Change, TensorInfo]]
    ) -> Iterator[TensorInfo]:
        """Yield what a tensor of a file is; the whole of two halves in place of the keys'."""
        released = self._released(tensor)
        if released is None:
            yield tensor
        elif released.change is not None:
            own = halves[released.names[0]]
            if len(own) < len(Change):
                yield tensor
            elif released.change is Change.KEYS:
                yield joined(released.names[0], tensor, own[Change.VALUES])
        else:
            for one in _experts(tensor, released.names):
                yield from self._restored(one)

    def _restored(self, own: TensorInfo) -> Iterator[TensorInfo]:
        """Yield a tensor in its released form: the whole of parts in place of the first one."""
        form, whole = self._form_of(own.name), self._whole_of(own.name)
        if form is not None:
            yield restored(own.name, [own], form)
        elif whole is None:
            yield own
        else:
            name, form, parts = whole
            found = [self._in_parts[part] for part in parts if part in self._in_parts]
            if len(found) < len(parts):
                yield own
            elif own.name == parts[0]:
                yield restored(name, found, form)

    @cached_property
    def _in_parts(self) -> dict[str, TensorInfo]:
        """Tensors that are parts of released ones, by their names."""
        if self.architecture.forms is None:
            return {}
        tensors = (tensor for header in self.headers for tensor in header.shard.tensors)
        named = (one for tensor in tensors for one in self._apart(tensor))
        return {one.name: one for one in named if self._whole_of(one.name) is not None}


def _once(header: GgufHeader, tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    """Return tensors of which no two have one name (InvalidInputError)."""
    counted = Counter(tensor.name for tensor in tensors)
    if len(counted) < len(tensors):
        raise InvalidInputError(
            f"Tensor {counted.most_common(1)[0][0]} is in two tensors of a GGUF file",
            where=header.shard.path,
            expected="kv_b_proj whole or in halves, and each other tensor once",
            todo="Get the file again, or another one of the same model",
        )
    return tensors


def _experts(tensor: TensorInfo, names: Sequence[str]) -> Iterator[TensorInfo]:
    """Yield the matrices of single experts, which lie one after the other; a tensor that holds none
    under its one name, if it has one."""
    if len(tensor.shape) != 3:
        yield from (tensor._replace(name=name) for name in names)
        return
    if len(names) != tensor.shape[0]:
        yield tensor
        return
    size = tensor.size_bytes // len(names)
    for number, name in enumerate(names):
        start = tensor.offset_bytes + number * size
        yield tensor._replace(
            name=name, shape=tensor.shape[1:], offset_bytes=start, size_bytes=size
        )


def _check_alike(models: Sequence[_Model]) -> None:
    """Refuse a module beside a model of another architecture or vocabulary (InvalidInputError)."""
    for model in models[1:]:
        first = models[0]
        for what, key in (("architecture", ARCHITECTURE), ("vocabulary", TOKENS)):
            if model.keys.get(key) != first.keys.get(key):
                raise InvalidInputError(
                    f"The file of the MTP module has another {what} than the main model",
                    where=model.headers[0].shard.path,
                    expected=f"the {key} of {first.headers[0].shard.path.name}",
                    found="another one",
                    todo="Take the module of the same model",
                )


def _config(source: ByteSource, models: Sequence[_Model]) -> tuple[dict[str, Any], str]:
    """Return the config, with a hash of what it was read from: config.json, as bundles have it, or
    the keys."""
    if CONFIG_NAME in source.names():
        raw = source.read(CONFIG_NAME)
        config = parsed_json_object(source.path / CONFIG_NAME, raw)
        return config, hashlib.sha256(raw).hexdigest()
    names = frozenset[str]().union(*(model.names for model in models))
    # Only the file of a module may count it.
    counting = max(models, key=lambda model: model.count("nextn_predict_layers", 0))
    heads = "".join(header.shard.header_sha256 for model in models for header in model.headers)
    config = counting.architecture.config(counting.keys, names)
    return config, hashlib.sha256(heads.encode()).hexdigest()


def _format_of(tensor: TensorInfo) -> str | None:
    """Return the name of the format of a tensor's weights; None for those that any config has."""
    if any(one.dtype.is_opaque for one in held(tensor)):
        return _OPAQUE_BLOCKS
    if isinstance(tensor.file, JoinedHalves | Restored) and tensor.file.is_decoded:
        return _DECODED_BLOCKS
    of_gguf = tensor.dtype.is_packed or tensor.dtype is DType.F16
    return kind_of(tensor.dtype) if of_gguf else None


def _described(config: dict[str, Any], shards: Sequence[ShardHeader]) -> dict[str, Any]:
    """Return a config that names the format of every quantized matrix: the element types say it,
    whatever a config.json says beside them."""
    formats = {
        tensor.name.removesuffix(".weight"): name
        for shard in shards
        for tensor in shard.tensors
        if (name := _format_of(tensor)) is not None
    }
    return {**config, QUANTIZATION: {"quant_method": NAME, "formats": formats}}
