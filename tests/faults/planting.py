"""Changes of a bundle as a wrong exporter would have written it: tensors, configs, and a manifest
that agrees with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from cases import edit_json, read_json, read_shard
from mtp_checkpoints.containers.safetensors_header import read_header
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.model_identity import model_identity

INDEX = "model.safetensors.index.json"
MANIFEST = "mtp_export.json"
Change = Callable[[torch.Tensor], torch.Tensor]


def weight_map(folder: Path) -> dict[str, str]:
    return dict(read_json(folder / INDEX)["weight_map"])


def names(folder: Path, *parts: str) -> list[str]:
    """Sorted names of tensors that contain all these parts."""
    return sorted(name for name in weight_map(folder) if all(part in name for part in parts))


def read(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / weight_map(folder)[name])[name]


def write(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add (to the first shard) or drop (None) tensors; update index and manifest."""
    places = weight_map(folder)
    first = min(places.values())
    for shard in sorted({places.get(name, first) for name in changes}):
        tensors = load_file(folder / shard)
        for name, tensor in changes.items():
            if places.get(name, first) == shard:
                tensors.pop(name, None)
                if tensor is not None:
                    tensors[name] = tensor.contiguous()
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        places = {n: s for n, s in places.items() if s != shard} | dict.fromkeys(tensors, shard)
    edit_json(folder / INDEX, lambda index: index.update(weight_map=places))
    sign(folder.parent)


def change(folder: Path, name: str, how: Change) -> None:
    """Pass one tensor through a function."""
    write(folder, {name: how(read(folder, name))})


def change_all(folder: Path, chosen: list[str], how: Change) -> None:
    """Pass several tensors through a function."""
    assert chosen
    write(folder, {name: how(read(folder, name)) for name in chosen})


def swap(folder: Path, one: str, other: str) -> None:
    write(folder, {one: read(folder, other), other: read(folder, one)})


def edit_config(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    edit_json(folder / "config.json", how)
    sign(folder.parent)


def sign(bundle: Path) -> None:
    """Make the manifest agree with the bundle: sizes, checksums, tensors."""
    if (bundle / "main").is_dir() and (bundle / "mtp" / INDEX).exists():
        _sign_main(bundle)
    edit_json(bundle / MANIFEST, lambda manifest: _sign(bundle, manifest))


def _sign_main(bundle: Path) -> None:
    """Record the main model anew, as it is now, in manifest and draft."""
    headers = [
        read_header(LocalFolder(bundle / "main").file(path.name))
        for path in sorted((bundle / "main").glob("*.safetensors"))
    ]
    identity = model_identity(tensor for header in headers for tensor in header.tensors)
    edit_json(bundle / "mtp" / INDEX, lambda i: i["metadata"].update(main_identity=identity))
    edit_json(bundle / MANIFEST, lambda manifest: manifest.update(main_identity=identity))


def _sign(bundle: Path, manifest: dict[str, Any]) -> None:
    for name, part in manifest["parts"].items():
        folder = bundle / name
        present = {path.name for path in folder.glob("*.safetensors")}
        for gone in part["shards"].keys() - present:
            del part["shards"][gone]
        for shard in sorted(present):
            part["shards"][shard] = _signed_shard(folder / shard, part["shards"].get(shard, {}))
        part["files"] = {
            path.name: {
                "size_bytes": path.stat().st_size,
                "xxh3_128": xxhash.xxh3_128(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.iterdir())
            if path.name not in present
        }


def _signed_shard(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    header, data = read_shard(path)
    header.pop("__metadata__", None)
    facts = facts | {"size_bytes": path.stat().st_size}
    if "header_sha256" in facts:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        facts["header_sha256"] = hashlib.sha256(raw[8 : 8 + length]).hexdigest()
    if "tensors" in facts or "header_sha256" not in facts:
        known = facts.get("tensors", {})
        facts["tensors"] = {
            name: {"operation": "copy", "sources": [name]}
            | known.get(name, {})
            | {"xxh3_128": xxhash.xxh3_128(data[slice(*entry["data_offsets"])]).hexdigest()}
            for name, entry in header.items()
        }
    return facts


def flip_a_byte(path: Path, offset: int) -> None:
    """Flip a bit of one byte, as damage after the export; negative offsets count from the end."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def only_shard(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
