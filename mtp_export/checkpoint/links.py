"""Whole shards without copying: shared extents (reflink), else a second name (hard link)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from mtp_export.checkpoint.writer import sync_folder, temporary_path, write_failure
from mtp_export.errors import UnsupportedError

_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


class Link(StrEnum):
    """How a shard that stays whole comes into the bundle."""

    AUTO = "auto"
    REFLINK = "reflink"
    HARDLINK = "hardlink"
    COPY = "copy"


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as src, target.open("wb") as dst:
        fcntl.ioctl(dst.fileno(), _FICLONE, src.fileno())


def _hardlink(source: Path, target: Path) -> None:
    os.link(os.path.realpath(source), target)


_MAKERS: dict[Link, Callable[[Path, Path], None]] = {
    Link.REFLINK: _reflink,
    Link.HARDLINK: _hardlink,
}


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def same_device(source: Path, folder: Path) -> bool:
    """Whether linking a file into a folder, existing or to be made, can work at all."""
    return source.stat().st_dev == existing_parent(folder).stat().st_dev


def resolve_link(wanted: Link, source: Path, folder: Path) -> Link:
    """The way that works between a source shard and a folder (or its parent): tried, then undone.

    Raises UnsupportedError when a way was asked for by name and does not work.
    """
    if wanted is Link.COPY:
        return Link.COPY
    reasons: list[str] = []
    probe = existing_parent(folder) / f".{folder.name}.link-probe-{os.getpid()}.tmp"
    for way in _MAKERS if wanted is Link.AUTO else (wanted,):
        try:
            _MAKERS[way](source, probe)
            return way
        except OSError as error:
            reasons.append(f"{way}: {error.strerror}")
        finally:
            probe.unlink(missing_ok=True)
    if wanted is Link.AUTO:
        return Link.COPY
    raise UnsupportedError(
        f"The file system cannot {wanted} from the input to the output",
        where=folder,
        found="; ".join(reasons),
        todo="Use --link auto or --link copy, or an output folder on the input's file system",
    )


def link_shard(way: Link, source: Path, target: Path) -> None:
    """Give a shard a second name, whole or not at all (IoError)."""
    temporary = temporary_path(target)
    try:
        temporary.unlink(missing_ok=True)
        _MAKERS[way](source, temporary)
        os.replace(temporary, target)
        # rename() does nothing between two names of one file: a repeated run leaves the temporary
        temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(target, error) from error
