"""Files that this tool put into an output folder, told from those that others put there: only its
own are ever removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence, Set
from pathlib import Path, PurePath

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, OutputExistsError
from mtp_checkpoints.sources.files import (
    name_when_whole,
    read_failure,
    sync_folder,
    write_failure,
)
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_export.bundle.journal import JOURNAL_NAME
from mtp_export.bundle.links import PROBE_PREFIX
from mtp_runtime.drafters import extra_drafts

PARTS = (MAIN, MTP, *extra_drafts())
SHARES_NAME = ".mtp_export.shares"
_ROOT_NAMES = (MANIFEST_NAME, JOURNAL_NAME, SHARES_NAME, DOWNLOADS_NAME)


def is_left_over(name: str) -> bool:
    """Return True for what a killed run leaves beside the parts."""
    return name_when_whole(name) in _ROOT_NAMES or name.startswith(PROBE_PREFIX)


def manifest_files(output: Path) -> frozenset[str]:
    """Return the files that a bundle's manifest lists, as paths below the bundle: none without a
    manifest or with a damaged one (IoError)."""
    if not (output / MANIFEST_NAME).is_file():
        return frozenset()
    try:
        parts = read_manifest(output)["parts"]
        return frozenset(
            f"{part}/{name}"
            for part, content in parts.items()
            for name in (*content["shards"], *content["files"])
        )
    except InvalidInputError:
        return frozenset()


def check_own(output: Path, files: Set[str]) -> None:
    """Refuse parts that hold anything but some files and what a run leaves while it writes them
    (OutputExistsError naming what else there is, IoError)."""
    folders = {str(parent) for name in files for parent in Path(name).parents}
    foreign = [
        name
        for name, is_folder in _entries(output)
        if not (name in folders if is_folder else name in files or _is_temporary(name, files))
    ]
    if foreign:
        raise foreign_files(output, foreign, "only what its manifest or journal lists")


def foreign_files(output: Path, names: Sequence[str], expected: str) -> OutputExistsError:
    """Return the error of an output folder that holds files which this tool did not write."""
    return OutputExistsError(
        "The output folder holds files that are not part of a bundle",
        where=output,
        expected=expected,
        found=", ".join(names[:3]),
        todo="Move them elsewhere, or choose another --output-dir; this tool does not remove them, "
        "not even with --overwrite",
    )


def clear(output: Path, files: Set[str], kept: Set[str] = frozenset()) -> None:
    """Remove the manifest and some files, and what a run leaves while it writes them, but for those
    that are kept (IoError). The journal says already which run goes on here.

    What makes the bundle and each part look finished goes first, and is gone even after a power cut
    before anything else goes.
    """
    try:
        (output / MANIFEST_NAME).unlink(missing_ok=True)
        remove_left_overs(output)
        sync_folder(output)
        for part in filter(Path.is_dir, (output / part for part in PARTS)):
            (part / CONFIG_NAME).unlink(missing_ok=True)
            sync_folder(part)
        remove_unfinished(output, files, kept)
        for name, is_folder in _entries(output):
            if is_folder and not any((output / name).iterdir()):
                (output / name).rmdir()
    except OSError as error:
        raise write_failure(output, error) from error


def remove_left_overs(output: Path) -> None:
    """Remove what killed runs left beside the parts (OSError)."""
    for path in [path for path in output.iterdir() if is_left_over(path.name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_unfinished(output: Path, files: Set[str], kept: Set[str] = frozenset()) -> None:
    """Remove some files of the parts, and what attempts to write them left, but for those that are
    kept (IoError). Others may be writing other files meanwhile."""
    try:
        for name, is_folder in _entries(output):
            if not is_folder and (name in files - kept or _is_temporary(name, files)):
                (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise write_failure(output, error) from error


def _is_temporary(name: str, files: Set[str]) -> bool:
    """Return True for a temporary file of one of some files."""
    path = PurePath(name)
    whole = name_when_whole(path.name)
    return whole is not None and str(path.with_name(whole)) in files


def _entries(output: Path) -> Iterator[tuple[str, bool]]:
    """Yield the parts and everything in them, as paths below the output, and True for a folder:
    each after what is in it, links not followed."""
    for part in PARTS:
        for folder, folders, files in os.walk(output / part, topdown=False, onerror=_refuse):
            place = Path(folder)
            links = [name for name in folders if (place / name).is_symlink()]
            for name in (*files, *links):
                yield (place / name).relative_to(output).as_posix(), False
            yield place.relative_to(output).as_posix(), True


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # of a part that is not there
        raise read_failure(error.filename, error)
