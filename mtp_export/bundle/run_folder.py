"""Folder that a run writes a bundle into: its lock and journal, what is finished in it and what
earlier runs left. What others put there is told from it, and never removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePath
from types import TracebackType

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, OutputExistsError
from mtp_checkpoints.sources.files import (
    name_when_whole,
    read_failure,
    sync_folder,
    write_failure,
)
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME, remove_downloads
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.journal import (
    JOURNAL_NAME,
    Journal,
    ShardFacts,
    first_difference,
    journaled,
)
from mtp_export.bundle.links import PROBE_PREFIX
from mtp_export.bundle.options import RunOptions, Share
from mtp_export.bundle.owner import OWNER_NAME
from mtp_export.paths import refuse_unprintable
from mtp_runtime.drafters import extra_drafts

PARTS = (MAIN, MTP, *extra_drafts())
SHARES_NAME = ".mtp_export.shares"
REQUEST_NAME = "request.json"
_ROOT_NAMES = (MANIFEST_NAME, JOURNAL_NAME, SHARES_NAME, DOWNLOADS_NAME)
# Beside the parts, while a run is unfinished and then.
_FOLDERS = (DOWNLOADS_NAME, SHARES_NAME)
_FILES = (MANIFEST_NAME, JOURNAL_NAME)
_SHARE_ROOM = re.compile(r"([1-9]\d{0,2})-of-([1-9]\d{0,2})")


class RunFolder:
    """Output folder of a plan, locked for the run of it or of the share that its options ask for.

    room is the folder of the journal and the downloads: the output, or that of the share. Raises
    OutputExistsError when another run holds it.
    """

    def __init__(self, plan: BundlePlan) -> None:
        self._plan, self._output = plan, plan.options.output_dir
        self._share = plan.options.run.share
        self.room = room_of(self._output, self._share)
        self._journal = Journal(self.room)
        self.record = self._journal.record

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    @property
    def finished(self) -> Mapping[str, ShardFacts]:
        """Facts of every finished shard, by its key."""
        return self._journal.finished

    def begin(self) -> None:
        """Resume an earlier run, or begin; then clear the output of what is not finished.

        The output is checked again, now that no other run can change it. Raises OutputExistsError
        or IoError.
        """
        try:
            check_output(self._output, self._plan.options.run)
            files = self._files() if self._share is None else self._files_of(self._share)
            resumes = self._resume()  # from here on the journal is written
        except OutputExistsError:
            if self._journal.is_empty:
                self.remove()
            raise
        if not resumes:
            command = self._plan.options.run.command
            self._journal.begin(self._plan.identity, files, command)
            remove_downloads(self.room)
        self._clear(files, kept=self.finished.keys())

    def discard(self) -> None:
        """Remove everything of the run: nothing made of a wrong source is worth keeping."""
        remove_downloads(self.room)
        self._clear(self._journal.files)
        self.remove()

    def remove(self) -> None:
        """Remove the journal, and with the last share's what all shares have (IoError)."""
        self._journal.remove()
        shares = self._output / SHARES_NAME
        if self._share is None or any(path.is_dir() for path in shares.glob("*")):
            return
        (shares / REQUEST_NAME).unlink(missing_ok=True)
        parts = (self._output / part.name for part in self._plan.parts)
        for folder in (*parts, shares, self._output):
            with suppress(OSError):  # it holds something
                folder.rmdir()

    def _clear(self, files: Set[str], kept: Set[str] = frozenset()) -> None:
        """Remove files of the run that are not kept; beside shares that others may be writing, no
        more than those."""
        (clear if self._share is None else remove_unfinished)(self._output, files, kept)

    def _files(self) -> frozenset[str]:
        """Return the files that a whole run writes or replaces (OutputExistsError if there are
        others)."""
        before = journaled(self._output)
        earlier = frozenset() if before is None else before.files
        files = self._plan.files | manifest_files(self._output) | earlier
        check_own(self._output, files)
        return files

    def _files_of(self, share: Share) -> frozenset[str]:
        """Return the files that a share writes (OutputExistsError where it cannot join others)."""
        if (self._output / MANIFEST_NAME).exists():
            raise finished_bundle(self._output, self._plan.options.run)
        _check_others(self._plan, share)
        check_own(self._output, self._plan.files)
        return frozenset(job.key for job in self._plan.share_jobs)

    def _resume(self) -> bool:
        """Return whether the journal goes on; raises what Journal.resume does."""
        run = self._plan.options.run
        if self._journal.is_empty or not run.resume:
            return False
        try:
            self._journal.resume(self._plan.identity, self._output, self._share)
        except OutputExistsError:
            if not run.overwrite:
                raise
            return False
        return True


def room_of(output: Path, share: Share | None) -> Path:
    """Return the folder that a run has for itself."""
    if share is None:
        return output
    return output / SHARES_NAME / f"{share.number}-of-{share.count}"


def begun_shares(output: Path) -> Iterator[Share]:
    """Yield the shares that have begun."""
    for path in sorted((output / SHARES_NAME).glob("*")):
        match = _SHARE_ROOM.fullmatch(path.name)
        if match and journaled(path) is not None:
            yield Share(int(match[1]), int(match[2]))


def _check_others(plan: BundlePlan, share: Share) -> None:
    """Refuse to add a share to those of another bundle or another division (OutputExistsError)."""
    for other in begun_shares(plan.options.output_dir):
        if other.count != share.count:
            raise OutputExistsError(
                "The output folder holds shares of another division",
                where=plan.options.output_dir,
                expected=f"one of {other.count} shares, as share {other} is",
                found=f"--share {share}{share.said}",
                todo="Divide the work as the others did, or choose another --output-dir",
            )
        run = journaled(room_of(plan.options.output_dir, other))
        if other != share and run is not None and run.identity != plan.identity:
            theirs, ours = first_difference(run.identity, plan.identity)
            raise OutputExistsError(
                "The output folder holds shares of something else",
                where=plan.options.output_dir,
                expected=f"{theirs} (in share {other})",
                found=f"{ours} (now)",
                todo="Give every share the same options and the same, unchanged source; or choose"
                " another --output-dir",
            )


def check_output(output: Path, run: RunOptions) -> None:
    """Refuse an output folder that holds something this run must not touch (OutputExistsError), and
    one whose path cannot be printed (UsageError).

    Usable are a missing or empty folder and that of an unfinished run (it has a journal; for a
    share, other shares), and with overwrite also a finished bundle that nobody put other files
    into.
    """
    refuse_unprintable(output)
    if not output.is_dir():
        if os.path.lexists(output):
            raise OutputExistsError(
                "The output is not a folder", where=output, todo="Choose another --output-dir"
            )
        return
    names = {path.name for path in output.iterdir() if not is_left_over(path.name)} - {OWNER_NAME}
    _check_kind(output, names, run)
    folders = [output / name for name in (*PARTS, *_FOLDERS) if name in names]
    others = [path.name for path in folders if path.is_symlink() or not path.is_dir()]
    foreign = others or sorted(names - {*PARTS, *_FOLDERS, *_FILES})
    if foreign or (names and not names & {MANIFEST_NAME, JOURNAL_NAME, SHARES_NAME}):
        raise foreign_files(output, foreign or sorted(names), "a new or empty folder")
    if is_finished(output):
        if not run.overwrite:
            raise finished_bundle(output, run)
        check_own(output, manifest_files(output))


def finished_bundle(output: Path, run: RunOptions) -> OutputExistsError:
    """Return the error of an output folder that holds a bundle already."""
    replaced = "Remove it" if run.share is not None else "Pass --overwrite to replace it"
    return OutputExistsError(
        "The output folder already holds a finished bundle",
        where=output,
        todo=f"{replaced}, or choose another --output-dir",
    )


def _check_kind(output: Path, names: Set[str], run: RunOptions) -> None:
    """Refuse a whole run where shares are unfinished, and the reverse (OutputExistsError)."""
    if run.share is None and SHARES_NAME in names:
        raise OutputExistsError(
            "The output folder holds shares of an unfinished bundle",
            where=output,
            expected="--share, as they had it",
            todo=f"Run those that are missing, and mtp-export finish {output}; or choose another"
            " --output-dir",
        )
    if run.share is not None and JOURNAL_NAME in names:
        whole = journaled(output)
        raise OutputExistsError(
            "The output folder holds an unfinished run that was not divided into shares",
            where=output,
            found="--share",
            todo="Choose another --output-dir, or finish that run by its own command",
            command="" if whole is None else whole.again(output),
        )


def is_finished(output: Path) -> bool:
    """Return whether a folder holds a bundle, and no run that is still to be finished."""
    journal = output / JOURNAL_NAME
    unfinished = journal.exists() and journal.stat().st_size > 0
    shared = (output / SHARES_NAME).is_dir()
    return (output / MANIFEST_NAME).exists() and not (unfinished or shared)


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
