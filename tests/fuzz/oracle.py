"""Oracles on what a command left behind: bundles byte by byte, manifests claim by claim."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from cases import write_shard
from fuzz.mutators.shard import read_shard as read_shard_bytes
from fuzz.sandbox import Finding
from fuzz.tensors import (
    check_equal,
    expected_main,
    expected_mtp,
    read_object,
    read_shard,
    read_tensors,
)

MANIFEST, CONFIG, INDEX = "mtp_export.json", "config.json", "model.safetensors.index.json"
JOURNAL, OWNER = ".mtp_export.journal", ".mtp_export.owner"
_TRAVELS = ("*.json", "tokenizer*", "LICENSE*", "*.jinja", "*.py", "*.model", "merges.txt")
_ONE_LAYER = ("num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace")
# Fields of config.json that each target changes in the draft's.
_CHANGED: dict[str, tuple[str, ...]] = {
    "hf": (),
    "lightllm": (*_ONE_LAYER, "quantization_config"),
    "paddlenlp": (*_ONE_LAYER, "quantization_config"),
    "xllm": (*_ONE_LAYER, "quantization_config", "model_type", "architectures"),
}


def check_nothing_whole(output: Path) -> None:
    """Raise a Finding when a refused run left anything that a loader or verify takes for whole."""
    whole = [path for path in output.rglob("*") if path.name in (MANIFEST, CONFIG)]
    if whole:
        raise Finding("looks whole", "after a failure", ", ".join(map(str, whole)))


def check_export(source: Path, output: Path, target: str, parts: tuple[str, ...]) -> None:
    """Raise a Finding unless a bundle is what its source's tensors and files make it."""
    tensors, config = read_tensors(source), read_object(source / CONFIG)
    makers = {
        "main": lambda: expected_main(tensors, config),
        "mtp": lambda: expected_mtp(tensors, config, target),
    }
    _check_layout(output, parts)
    for part in parts:
        folder = output / part
        check_equal(read_tensors(folder), makers[part](), f"{target} {part}")
        _check_index(folder)
        changed = _CHANGED[target] if part == "mtp" else ()
        _check_config(config, read_object(folder / CONFIG), changed, f"{target} {part}")
        _check_files(source, folder)
    check_claims(output)


def check_parts(source: Path, output: Path) -> None:
    """Raise a Finding unless the tensors of a bundle's parts are what its source makes them.

    Files that travel along are not compared: a listing that lacks one looks like any other.
    """
    tensors, config = read_tensors(source), read_object(source / CONFIG)
    parts = {"main": expected_main(tensors, config), "mtp": expected_mtp(tensors, config, "hf")}
    for name in parts.keys() & {path.name for path in output.iterdir()}:
        check_equal(read_tensors(output / name), parts[name], f"remote {name}")
        _check_index(output / name)
    check_claims(output)


def check_quantized(source: Path, output: Path, reference: Path) -> None:
    """Raise a Finding unless a bundle equals the one made of a rewriting of its source."""
    _check_layout(output, ("main", "mtp"))
    for part in ("main", "mtp"):
        one, other = output / part, reference / part
        check_equal(read_tensors(one), read_tensors(other), f"quantized {part}")
        _check_index(one)
        _check_config(read_object(other / CONFIG), read_object(one / CONFIG), (), part)
        _check_files(source, one)
    check_claims(output)


def rewrite(source: Path, folder: Path) -> None:
    """Write a checkpoint again from what safetensors' and Python's own readers see in it."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in sorted(read_tensors(source).items()):
        offsets = [len(data), len(data) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.data
    write_shard(folder / "model.safetensors", header, data)
    (folder / CONFIG).write_text(json.dumps(read_object(source / CONFIG)))


def check_claims(bundle: Path) -> None:
    """Raise a Finding when the manifest claims what is not so, or leaves a file or tensor out."""
    claims = list(false_claims(bundle))
    if claims:
        raise Finding("wrong bytes", f"manifest: {claims[0][0]}", "\n".join(map(str, claims[:10])))


def false_claims(bundle: Path) -> Iterator[tuple[str, str]]:
    """Yield what a bundle's manifest says that its files do not bear out: kind and place."""
    manifest = read_object(bundle / MANIFEST)
    parts = manifest.get("parts")
    names = {path.name for path in bundle.iterdir() if path.is_dir()}
    if not isinstance(parts, dict) or parts.keys() != names:
        yield "parts", str(names)
        return
    for name, part in parts.items():
        shards = part.get("shards") if isinstance(part, dict) else None
        files = part.get("files") if isinstance(part, dict) else None
        if not isinstance(shards, dict) or not isinstance(files, dict):
            yield "no shards or files", name
            continue
        there = {
            path.relative_to(bundle / name).as_posix()
            for path in (bundle / name).rglob("*")
            if path.is_file()
        }
        for odd in sorted(there ^ {*shards, *files}):
            yield "files of a part", f"{name}/{odd}"
        for file in sorted(there & files.keys()):
            facts = files[file]
            digest = facts.get("xxh3_128") if isinstance(facts, dict) else None
            if digest != xxhash.xxh3_128((bundle / name / file).read_bytes()).hexdigest():
                yield "checksum of a file", f"{name}/{file}"
        for file in sorted(there & shards.keys()):
            yield from _false_shard(bundle / name / file, shards[file])


def _false_shard(path: Path, facts: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(facts, dict) or facts.get("size_bytes") != path.stat().st_size:
        yield "size of a shard", str(path)
        return
    if path.suffix == ".gguf":  # tensors have released names in the manifest: verify reads them
        return
    header, _ = read_shard_bytes(path)
    if facts.get("header_sha256", sha256(header).hexdigest()) != sha256(header).hexdigest():
        yield "header of a shard", str(path)
    if "link" in facts and "tensors" not in facts:  # not read, and said so
        return
    tensors, stored = facts.get("tensors"), read_shard(path)
    if not isinstance(tensors, dict) or tensors.keys() != stored.keys():
        yield "tensors of a shard", str(path)
        return
    for name, tensor in stored.items():
        entry = tensors[name]
        digest = entry.get("xxh3_128") if isinstance(entry, dict) else None
        if digest != xxhash.xxh3_128(tensor.data).hexdigest():
            yield "checksum of a tensor", name


def _check_layout(output: Path, parts: tuple[str, ...]) -> None:
    found = {path.name for path in output.iterdir()}
    if found != {*parts, MANIFEST}:
        raise Finding("wrong bytes", "files of a bundle", str(sorted(found)))


def _check_index(folder: Path) -> None:
    """The index names every tensor of every shard, and nothing else."""
    places = {name: path.name for path in folder.glob("*.safetensors") for name in read_shard(path)}
    index = read_object(folder / INDEX)
    if index["weight_map"] != places:
        raise Finding("wrong bytes", "index", str(folder))


def _check_config(
    expected: dict[str, Any], found: dict[str, Any], changed: tuple[str, ...], where: str
) -> None:
    keys = {*expected, *found} - {*changed}
    wrong = [key for key in sorted(keys) if repr(found.get(key)) != repr(expected.get(key))]
    if wrong:
        raise Finding("wrong bytes", f"{where}: config", ", ".join(wrong[:10]))


def _check_files(source: Path, folder: Path) -> None:
    """Every file that travels along is there, and each is its source's in every byte."""
    for path in source.rglob("*"):
        name = path.relative_to(source).as_posix()
        if path.is_file() and name not in (CONFIG, INDEX) and _travels(name):
            copy = folder / name
            if not copy.is_file() or copy.read_bytes() != path.read_bytes():
                raise Finding("wrong bytes", "a file that travels along", name)


def _travels(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _TRAVELS)
