"""Reader of mtp_export.json, the manifest that makes a folder a bundle; bundle/ writes it last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import parsed_json_object

MANIFEST_NAME = "mtp_export.json"
FORMAT = "mtp-export bundle"
FORMAT_VERSION = 1
MAIN_IDENTITY = "main_identity"

_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: type(value) is str,
    "a size in bytes": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "a number or null": lambda value: value is None or type(value) in (int, float),
    "a list of texts": lambda value: type(value) is list and all(type(v) is str for v in value),
}
_FILE = {"size_bytes": "a size in bytes", "xxh3_128": "text"}
_OPTIONS = {
    **dict.fromkeys(("part?", "target?", "base_quant?", "mtp_quant?", "reader?"), "text"),
    "main_storages?": "a list of texts",
    "tune?": {"*": {}},
    "calibrate?": {"parts?": "a list of texts"},
}
_TENSORS = {
    "*": {
        "operation": "text",
        "xxh3_128": "text",
        "sqnr_db?": "a number or null",
        "folded?": "text",
    }
}
_WRITTEN = {"size_bytes": "a size in bytes", "header_sha256?": "text", "tensors": _TENSORS}
_LINKED = {"size_bytes": "a size in bytes", "header_sha256": "text", "tensors?": _TENSORS}


def _shard(entry: Any) -> Mapping[str, Any]:
    """Return the shape of a shard's entry: one that was linked may not have been read."""
    return _LINKED if isinstance(entry, dict) and "link" in entry else _WRITTEN


# Kinds of the values that are read, as docs/bundle.md lists them. "*" is any name; a name with "?"
# may be missing, any other may not: what has no checksum would pass unseen.
_SHAPE = {
    "options": _OPTIONS,
    f"{MAIN_IDENTITY}?": "text",
    "sizes?": dict.fromkeys(("bytes_before", "bytes_after"), "a size in bytes"),
    "source": {"shards": {"*": {"size_bytes": "a size in bytes"}}},
    "parts": {"*": {"shards": {"*": _shard}, "files": {"*": _FILE}}},
}


def read_manifest(bundle: Path) -> Mapping[str, Any]:
    """Return the manifest of a bundle; what is read of it is there and of its kind.

    Raises InvalidInputError for none, another format or a value of another kind, IoError.
    """
    path = bundle / MANIFEST_NAME
    if not path.exists():
        raise InvalidInputError(
            "The bundle has no manifest",
            where=path,
            expected="the file that every finished export writes last",
            todo="Name the output folder of a run; the same command finishes an interrupted one",
        )
    return _content(path, LocalFolder(bundle).read(MANIFEST_NAME))


@lru_cache(maxsize=2)  # a command asks for a bundle's many times; a large model's takes a second
def _content(path: Path, raw: bytes) -> Mapping[str, Any]:
    """Return the content of a manifest's bytes, checked."""
    content = parsed_json_object(path, raw)
    version = (content.get("format"), content.get("format_version"))
    if version != (FORMAT, FORMAT_VERSION):
        raise InvalidInputError(
            "The manifest is in a format that this version does not read",
            where=path,
            expected=f"{FORMAT}, version {FORMAT_VERSION}",
            found=f"{version[0]}, version {version[1]}",
            todo="Use the version of mtp-export that wrote it, or export again",
        )
    _check_kinds(path, content, shape=_SHAPE, names=())
    return content


def manifest_sha256(bundle: Path) -> str:
    """Return the SHA-256 of a bundle's manifest, by which a report names the bundle (IoError)."""
    return hashlib.sha256(LocalFolder(bundle).read(MANIFEST_NAME)).hexdigest()


def _check_kinds(path: Path, value: Any, shape: Any, names: tuple[str, ...]) -> None:
    """Refuse a value, by the names that lead to it, that is not as the shape has it."""
    if callable(shape):
        shape = shape(value)
    if isinstance(shape, str):
        if not _KINDS[shape](value):
            raise _damaged(path, names, expected=shape, found=repr(value))
        return
    if not isinstance(value, dict):
        raise _damaged(path, names, expected="an object", found=repr(value))
    for name in shape:
        if name not in value and name != "*" and not name.endswith("?"):
            raise _damaged(path, names, expected=f"an entry {name}", found="none")
    for name, inner in value.items():
        inner_shape = shape.get(name, shape.get(f"{name}?", shape.get("*")))
        if inner_shape is not None:
            _check_kinds(path, inner, shape=inner_shape, names=(*names, name))


def _damaged(path: Path, names: tuple[str, ...], *, expected: str, found: str) -> InvalidInputError:
    where = f" at {' → '.join(names)}" if names else ""
    return InvalidInputError(
        f"The manifest is damaged{where}",
        where=path,
        expected=expected,
        found=found[:100],
        todo="Export again",
    )
