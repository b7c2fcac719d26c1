"""Files that lie in the place of others, by their first bytes."""

from __future__ import annotations

MOST_TELLING = 32  # first bytes of a file that are looked at
LFS_POINTER = "a pointer of Git LFS"
_BEGINNINGS = {
    b"version https://git-lfs.": LFS_POINTER,
    b"<!doctype html": "an HTML page, as servers send in place of a file",
    b"<html": "an HTML page, as servers send in place of a file",
    b"\x1f\x8b": "compressed by gzip",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
}


def kind_of_file(beginning: bytes) -> str:
    """Return in words what begins with these bytes; "" for anything else."""
    text = beginning.lstrip().lower()
    kinds = (kind for start, kind in _BEGINNINGS.items() if text.startswith(start.lower()))
    return next(kinds, "")
