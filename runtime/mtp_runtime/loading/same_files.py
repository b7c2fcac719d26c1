"""Comparison of the files that several ranks load: each opens its own, which must hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from mtp_checkpoints.containers.base import CONFIG_NAME, ShardHeader
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_runtime.loading.draft_folder import medusa_file
from mtp_runtime.loading.on_demand import READERS
from mtp_runtime.parallel.group import Group

SAMPLE_BYTES = 256  # of the middle of every tensor

Digests = dict[str, str]  # by the path of a file


def require_same_files(checkpoints: Iterable[Checkpoint], group: Group) -> None:
    """Raise InvalidInputError on every rank where a file of one differs from rank 0's: a config,
    or a shard in its size, its header, or the sampled bytes of a tensor."""
    if not group.is_one:
        _compare(_digests_of(checkpoints), group)


def require_same_draft(folder: Path, group: Group) -> None:
    """Raise as require_same_files for the folder of a draft."""
    if group.is_one:
        return
    file = medusa_file(folder)
    if file is None:
        require_same_files([Checkpoint.open(folder)], group)
        return
    with file.open("rb") as content:
        _compare({str(file): hashlib.file_digest(content, "sha256").hexdigest()}, group)


def _compare(digests: Digests, group: Group) -> None:
    expected: Digests = group.shared(digests)
    names = [*expected]
    unlike = [n for n, name in enumerate(names) if digests.get(name) != expected[name]]
    if not unlike and digests.keys() != expected.keys():
        unlike = [0]
    first = group.smallest(unlike[0] if unlike else len(names))
    if first < len(names):
        raise InvalidInputError(
            "The processes of this run see different files",
            where=names[first],
            expected="the content that rank 0 has there, on every machine",
            found="other bytes on this rank" if unlike else "other bytes on another rank",
            todo="Copy rank 0's files to all machines, or use a shared file system",
        )


def _digests_of(checkpoints: Iterable[Checkpoint]) -> Digests:
    digests, shards = Digests(), list[ShardHeader]()
    for checkpoint in checkpoints:
        digests[str(checkpoint.path / CONFIG_NAME)] = checkpoint.config_sha256
        shards += checkpoint.shards
    with ThreadPoolExecutor(READERS) as pool:
        return digests | dict(zip(map(_name, shards), pool.map(_digest, shards), strict=True))


def _name(shard: ShardHeader) -> str:
    return str(shard.path)


def _digest(shard: ShardHeader) -> str:
    """Return a digest of a shard's size and header, and of a sample of every tensor."""
    digest = hashlib.sha256(f"{shard.size_bytes} {shard.header_sha256}".encode())
    with closing(shard.file.open()) as file:
        for tensor in shard.tensors:
            if tensor.path != shard.path:  # computed from others
                continue
            size = min(SAMPLE_BYTES, tensor.size_bytes)
            start = tensor.offset_bytes + (tensor.size_bytes - size) // 2
            digest.update(file.read(start, start + size))
    return digest.hexdigest()
