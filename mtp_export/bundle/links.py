"""Links to whole shards instead of copies: shared extents (reflink), else a hard link."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.sources.byte_source import Place, local_path
from mtp_checkpoints.sources.files import sync_folder, temporary_path, write_failure
from mtp_export.bundle.owner import has_ended, process_mark
from mtp_export.plan import Link

_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
# Failures of the disk, which say nothing about links.
_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
PROBE_PREFIX = ".mtp-export-probe-"
_COPIED_BYTES = 1 << 24  # at a time
_ABANDONED_SECONDS = 60.0  # a try takes a few milliseconds


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as src, target.open("xb") as dst:
        fcntl.ioctl(dst.fileno(), _FICLONE, src.fileno())
        os.fsync(dst.fileno())


def _hardlink(source: Path, target: Path) -> None:
    os.link(os.path.realpath(source), target)


_MAKERS: dict[Link, Callable[[Path, Path], None]] = {
    Link.REFLINK: _reflink,
    Link.HARDLINK: _hardlink,
}


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def resolve_links(wanted: Link, shards: Iterable[Place], folder: Path) -> dict[Place, Link]:
    """Return for each source shard the way that works into a folder; remote ones are copied.

    It is tried once per device and owner, then undone.

    Raises UnsupportedError when a way was asked for by name and does not work, IoError when the
    disk fails.
    """
    shards = list(shards)
    result = _copied(wanted, shards)
    by_device: dict[tuple[int, int], Link] = {}
    for shard in (local_path(shard) for shard in shards if shard not in result):
        stat = shard.stat()
        key = (stat.st_dev, stat.st_uid)
        if key not in by_device:
            by_device[key] = _try(wanted, shard, folder)
        result[shard] = by_device[key]
    return result


def _copied(wanted: Link, shards: Iterable[Place]) -> dict[Place, Link]:
    """Return the shards that are copied without a try: all, or where nobody named a way the remote
    ones."""
    return {
        shard: Link.COPY
        for shard in shards
        if wanted is Link.COPY or (wanted is Link.AUTO and not isinstance(shard, Path))
    }


def guess_links(wanted: Link, shards: Iterable[Place], folder: Path) -> dict[Place, Link]:
    """Return what resolve_links likely would, judged by devices and owners; write nothing."""
    shards = list(shards)
    result = _copied(wanted, shards)
    device = existing_parent(folder).stat().st_dev
    user = os.geteuid()

    def guess(shard: Path) -> Link:
        stat = shard.stat()
        allowed = user in (0, stat.st_uid) or os.access(shard, os.W_OK)
        if wanted is Link.AUTO:
            return Link.HARDLINK if stat.st_dev == device and allowed else Link.COPY
        return wanted

    local = (shard for shard in shards if shard not in result)
    return result | {shard: guess(local_path(shard)) for shard in local}


def _try(wanted: Link, source: Path, folder: Path) -> Link:
    """Return the way that works. Each try has a folder of its own: shares of a bundle may begin at
    the same time."""
    reasons: list[str] = []
    parent = existing_parent(folder)
    try:
        prefix = f"{PROBE_PREFIX}{process_mark()}-"
        trial = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise write_failure(parent, error) from error
    try:
        _remove_abandoned(trial)
        for way in _MAKERS if wanted is Link.AUTO else (wanted,):
            try:
                _MAKERS[way](source, trial / way)
                return way
            except OSError as error:
                if error.errno in _DISK_FAILURES:
                    raise write_failure(trial, error) from error
                reasons.append(f"{way}: {error.strerror}")
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    if wanted is Link.AUTO:
        return Link.COPY
    raise UnsupportedError(
        f"The file system cannot {wanted} from the input to the output",
        where=f"{source} to {folder}",
        found="; ".join(reasons),
        todo="Use --link auto or --link copy, or an output folder on the input's file system",
    )


def _remove_abandoned(trial: Path) -> None:
    """Remove what killed tries left beside one that has just begun: at once those of this machine,
    others when they are old."""
    began = trial.stat().st_mtime  # by the clock of the file system, as those of the others
    for other in trial.parent.glob(f"{PROBE_PREFIX}*"):
        mark = other.name.removeprefix(PROBE_PREFIX).rpartition("-")[0]
        with suppress(OSError):  # its try has removed it
            if has_ended(mark) or other.stat().st_mtime < began - _ABANDONED_SECONDS:
                shutil.rmtree(other)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as src, target.open("xb") as dst:
        shutil.copyfileobj(src, dst, _COPIED_BYTES)
        dst.flush()
        os.fsync(dst.fileno())


def link_shard(way: Link, source: Path, target: Path) -> None:
    """Link a shard, or copy it, whole or not at all (IoError)."""
    temporary = temporary_path(target)
    try:
        try:
            make = _copy if way is Link.COPY else _MAKERS[way]
            make(source, temporary)
            os.replace(temporary, target)
        finally:  # rename() does nothing between two links to one file: the temporary would stay
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise write_failure(target, error) from error
