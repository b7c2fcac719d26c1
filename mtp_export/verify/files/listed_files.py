"""Configs, indexes and tokenizers of a part as the manifest lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.evidence.parts import Part


def unlike_listed(part: Part, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of a part's files that are missing or changed, with a sentence each. entry:
    the part's in the manifest."""
    here = {p.relative_to(part.folder).as_posix() for p in part.folder.rglob("*") if p.is_file()}
    unlike = {}
    for name, facts in entry.get("files", {}).items():
        if name not in here:  # a manifest's names lead nowhere else
            unlike[name] = causes.file_missing(name)
        elif not _is_as_listed(part.folder / name, facts):
            unlike[name] = causes.file_changed(name)
    return unlike


def _is_as_listed(path: Path, facts: Mapping[str, Any]) -> bool:
    """True for a file with the manifest's size and checksum; another size is not read at all."""
    if path.stat().st_size != facts.get("size_bytes"):
        return False
    return xxhash.xxh3_128(path.read_bytes()).hexdigest() == facts.get("xxh3_128")
