"""Content of mtp_export.json: the options of a bundle, its source, and a checksum of every tensor.

It holds nothing that differs between two runs of the same command, so an interrupted run ends with
the same bytes as any other. It is written last: a bundle with a manifest is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mtp_checkpoints.sources.byte_source import ByteFile, RemoteFile
from mtp_checkpoints.tensors.manifest import FORMAT, FORMAT_VERSION
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.journal import ShardFacts
from mtp_export.plan import OutputShard, PartPlan


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the identity of a source: hash of its config, size and header hash of each shard; of
    a remote one also its address, and by what its host tells one content of a shard from another:
    a checksum, else a version."""
    return {
        **checkpoint.origin,
        "config_sha256": checkpoint.config_sha256,
        "shards": {
            checkpoint.shard_name(shard): {
                "size_bytes": shard.size_bytes,
                "header_sha256": shard.header_sha256,
                **_as_listed(shard.file),
            }
            for shard in checkpoint.shards
        },
    }


def _as_listed(file: ByteFile) -> dict[str, str]:
    if file.sha256:
        return {"sha256": file.sha256}
    return {"version": file.version} if isinstance(file, RemoteFile) else {}


def shard_versions(checkpoint: Checkpoint) -> dict[str, int | str]:
    """Return the version of each shard: together with source_identity, a source that changed is
    told from one that did not."""
    return {checkpoint.shard_name(shard): shard.version for shard in checkpoint.shards}


def manifest(
    head: Mapping[str, Any],
    parts: Sequence[tuple[PartPlan, Path]],
    finished: Mapping[str, ShardFacts],
    source: Checkpoint,
) -> dict[str, Any]:
    """Return the manifest of a finished bundle.

    head comes before the parts; finished is what the journal recorded of each shard, by
    "part/file name".
    """

    def facts_of(part: PartPlan, shard: OutputShard) -> ShardFacts:
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


def _shard(shard: OutputShard, facts: ShardFacts, source: Checkpoint) -> dict[str, Any]:
    """Return the entry of a shard.

    A linked shard is the source's file: it has the hash of its header, which lists its tensors. One
    that was written or checksummed has each tensor's operation, sources and checksum, and the facts
    that its transform returned.
    """
    entry: dict[str, Any] = {"size_bytes": facts.size_bytes}
    if shard.linked_from is not None:
        entry |= {
            "link": facts.link,
            "source_shard": source.shard_name(shard.linked_from),
            "header_sha256": shard.linked_from.header_sha256,
        }
    if facts.xxh3_128 is not None:
        entry["tensors"] = {
            tensor.name: {
                "operation": step.operation.name,
                **({"scheme": step.scheme} if step.scheme is not None else {}),
                "sources": list(step.inputs),
                "xxh3_128": facts.xxh3_128[tensor.name],
                **facts.facts.get(tensor.name, {}),
            }
            for step in shard.steps
            for tensor in step.outputs
        }
    return entry


def _files(part: PartPlan, folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and checksum of every file of a part that is not a shard."""
    return {
        path.relative_to(folder).as_posix(): {
            "size_bytes": path.stat().st_size,
            "xxh3_128": xxhash.xxh3_128(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder / name for name in part.other_files)
    }
