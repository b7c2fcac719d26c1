"""Checksums of local files and of what the Hub lists: SHA-256 in its storage, git's in git."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub.hf_api import RepoFile

from mtp_checkpoints.sources.files import read_failure
from mtp_export.progress import ProgressCallback

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path, progress: ProgressCallback) -> str:
    """Return the SHA-256 of a file (IoError)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress(len(chunk))
    except OSError as error:
        raise read_failure(path, error) from error
    return digest.hexdigest()


def has_digest(listed: RepoFile | None, sha256: str) -> bool:
    """Return whether the Hub lists a large file with this checksum."""
    return listed is not None and listed.lfs is not None and listed.lfs.sha256 == sha256


def has_bytes(listed: RepoFile | None, data: bytes) -> bool:
    """Return whether the Hub lists a file with the checksum and the size of these bytes."""
    if listed is None or listed.size != len(data):
        return False
    if listed.lfs is not None:
        return has_digest(listed, hashlib.sha256(data).hexdigest())
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return bool(listed.blob_id == blob.hexdigest())
