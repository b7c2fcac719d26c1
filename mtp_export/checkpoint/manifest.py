"""mtp_export.json: what a bundle is, from what it was made, and a checksum of every tensor.

It is written last and holds nothing that differs between two runs of the same command, so a
bundle with a manifest is whole, and an interrupted run ends with the same bytes as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mtp_export.checkpoint.plan import OutputShard, PartPlan
from mtp_export.checkpoint.reader import Checkpoint, read_json_object
from mtp_export.errors import InvalidInputError

MANIFEST_NAME = "mtp_export.json"
FORMAT = "mtp-export bundle"
FORMAT_VERSION = 1


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint is: the hash of its config, each shard's size and header hash."""
    return {
        "config_sha256": checkpoint.config_sha256,
        "shards": {
            checkpoint.shard_name(shard): {
                "size_bytes": shard.size_bytes,
                "header_sha256": shard.header_sha256,
            }
            for shard in checkpoint.shards
        },
    }


def modification_times(checkpoint: Checkpoint) -> dict[str, int]:
    """When each shard was last written (ns): with source_identity, whether a source changed."""
    return {checkpoint.shard_name(shard): shard.modified_ns for shard in checkpoint.shards}


def manifest(
    head: Mapping[str, Any],
    parts: Sequence[tuple[PartPlan, Path]],
    finished: Mapping[str, Mapping[str, Any]],
    source: Checkpoint,
) -> dict[str, Any]:
    """The manifest of a finished bundle; `finished` is what the journal noted of each shard."""

    def facts_of(part: PartPlan, shard: OutputShard) -> Mapping[str, Any]:
        return finished[f"{part.name}/{shard.file_name}"]

    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **head,
        "parts": {
            part.name: {
                "shards": {
                    shard.file_name: _shard(shard, facts_of(part, shard), source)
                    for shard in part.shards
                },
                "files": _files(part, folder),
            }
            for part, folder in parts
        },
    }


def _shard(shard: OutputShard, facts: Mapping[str, Any], source: Checkpoint) -> dict[str, Any]:
    """A linked shard is the source's file: it has the hash of its header, which lists its tensors.
    One that was written or checksummed has each tensor's operation, sources and checksum, and what
    its transform noted."""
    entry: dict[str, Any] = {"size_bytes": facts["size_bytes"]}
    if shard.linked_from is not None:
        entry |= {
            "link": facts["link"],
            "source_shard": source.shard_name(shard.linked_from),
            "header_sha256": shard.linked_from.header_sha256,
        }
    if shard.is_read:
        entry["tensors"] = {
            tensor.name: {
                "operation": step.operation.name,
                **({"scheme": step.scheme} if step.scheme is not None else {}),
                "sources": list(step.inputs),
                "xxh3_128": facts["xxh3_128"][tensor.name],
                **facts["facts"].get(tensor.name, {}),
            }
            for step in shard.steps
            for tensor in step.outputs
        }
    return entry


def _files(part: PartPlan, folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file of a part that is not a shard."""
    shards = {shard.file_name for shard in part.shards}
    return {
        path.relative_to(folder).as_posix(): {
            "size_bytes": path.stat().st_size,
            "xxh3_128": xxhash.xxh3_128(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in shards
    }


def read_manifest(bundle: Path) -> dict[str, Any]:
    """The manifest of a bundle (InvalidInputError for none or another format, IoError)."""
    path = bundle / MANIFEST_NAME
    if not path.exists():
        raise InvalidInputError(
            "The bundle has no manifest",
            where=path,
            expected="the file that every finished export writes last",
            todo="Run the export again: it goes on where it stopped",
        )
    content = read_json_object(path)
    found = (content.get("format"), content.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise InvalidInputError(
            "The manifest is in a format that this version does not read",
            where=path,
            expected=f"{FORMAT}, version {FORMAT_VERSION}",
            found=f"{found[0]}, version {found[1]}",
        )
    return content
