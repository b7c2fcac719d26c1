"""Shares of a bundle: runs of one command, on one machine or many, that make different shards of it
in one folder, and their end.

Each share has a folder with its own journal, lock, owner and downloads, and writes no other's
files. Until the end nothing beside the shards is written, so nothing looks whole.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, OutputExistsError
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.files import (
    read_failure,
    sync_folder,
    temporary_path,
    write_failure,
    write_json,
)
from mtp_checkpoints.sources.staging import remove_downloads
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_export.bundle.build import BundleResult, facts_of
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.division import divided
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.journal import (
    Journal,
    first_difference,
    journaled_run,
    journaled_shards,
)
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.options import Share
from mtp_export.bundle.own_files import (
    SHARES_NAME,
    check_own,
    remove_left_overs,
    remove_unfinished,
)
from mtp_export.bundle.owner import owner_of
from mtp_export.bundle.preflight import check_output, finished_bundle, is_finished
from mtp_export.bundle.request import Request, restored
from mtp_export.bundle.run import ShardJob, is_made
from mtp_export.bundle.work import Work, check_unchanged, jobs_left, make_shards, write_rest
from mtp_export.progress import ProgressCallback

_NAME = re.compile(r"([1-9]\d{0,2})-of-([1-9]\d{0,2})")
_REQUEST_NAME = "request.json"
_MOST_NAMED = 12


@dataclass(frozen=True)
class ShareResult:
    """A finished share. resumed_shards of its jobs were finished by an earlier run."""

    plan: BundlePlan
    share: Share
    jobs: Sequence[ShardJob]
    seconds: float
    resumed_shards: int


def jobs_of(jobs: Sequence[ShardJob], share: Share | None) -> list[ShardJob]:
    """Return a share's jobs, in order; all without one."""
    return list(jobs) if share is None else _divided(jobs, share.count)[share.number - 1]


def _divided(jobs: Sequence[ShardJob], count: int) -> list[list[ShardJob]]:
    shares = divided([job.read_bytes for job in jobs], count)
    return [[jobs[number] for number in share] for share in shares]


def run_share(request: Request, plan: BundlePlan, progress: ProgressCallback) -> ShareResult:
    """Make the shards of the share that a request asks for, or what an earlier run of it left of
    them.

    Raises OutputExistsError, InvalidInputError or IoError. After an IoError the same command goes
    on where it stopped.
    """
    start, share = time.monotonic(), request.bundle.run.share
    assert share is not None
    room, jobs = _room(plan, share), jobs_of(plan.jobs, share)
    with Journal(room) as journal:
        _open_journal(plan, share, journal)
        write_json(room.parent / _REQUEST_NAME, request.recorded())
        resumed = len(journal.finished.keys() - {CHECKS})
        work = Work(
            jobs=jobs_left(jobs, journal.finished, progress),
            room=room,
            tied=plan.tied,
            checks=share.number == 1,
        )
        try:
            make_shards(plan, work, journal.record, progress)
            check_unchanged(plan.checkpoint)
        except InvalidInputError:
            remove_downloads(room)
            # nothing made of a wrong source is worth keeping
            remove_unfinished(plan.options.output_dir, journal.files)
            _remove(plan, journal)
            raise
        journal.record(CHECKS, ShardFacts(0))
    return ShareResult(plan, share, jobs, time.monotonic() - start, resumed)


def finish_shares(plan: BundlePlan) -> BundleResult:
    """Write what makes a bundle of finished shares whole.

    Raises InvalidInputError naming the shares that are missing or unfinished, OutputExistsError
    for one that is still running or was made of something else, or IoError.
    """
    start, output = time.monotonic(), plan.options.output_dir
    count = share_count(output)
    begun = {share.number: _room(plan, share) for share in _begun(output)}
    _check_all_there(plan, {n: journaled_shards(room) for n, room in begun.items()}, count)
    with ExitStack() as opened:
        journals = {n: opened.enter_context(Journal(room)) for n, room in begun.items()}
        for journal in journals.values():
            journal.resume(plan.identity)
        _check_all_there(plan, {n: one.finished for n, one in journals.items()}, count)
        finished = {key: facts for one in journals.values() for key, facts in one.finished.items()}
        check_own(output, plan.files)
        remove_unfinished(output, plan.files, kept=plan.files)
        write_rest(plan, finished)
        _retire(output)
    _remove_left_overs(output)  # once no journal is open: file servers keep open files
    return BundleResult(
        plan=plan,
        seconds=time.monotonic() - start,
        resumed_shards=0,
        facts=facts_of(finished),
        shares=count,
    )


def shared_request(output: Path) -> Request:
    """Return the request of the bundle that a folder's shares are of (InvalidInputError without
    shares or with a damaged request)."""
    share = Share(1, share_count(output))
    path = output / SHARES_NAME / _REQUEST_NAME
    try:
        return restored(strict_json.parse(path.read_bytes()), output, share)
    except OSError as error:
        raise read_failure(path, error) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            "What the shares were asked for cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            todo="Run any one of them again, with the same --share: it writes the file anew",
        ) from None


def share_count(output: Path) -> int:
    """Return how many shares a folder's bundle is divided into (InvalidInputError if it has
    none)."""
    count = next((share.count for share in _begun(output)), None)
    if count is None:
        if is_finished(output):  # by an end that was killed late
            _remove_left_overs(output)
        raise InvalidInputError(
            "There are no shares to finish",
            where=output,
            expected="the output folder of runs with --share",
            todo="Check the folder: a finished bundle has no shares any more",
        )
    return count


def _room(plan: BundlePlan, share: Share) -> Path:
    return plan.options.output_dir / SHARES_NAME / f"{share.number}-of-{share.count}"


def _begun(output: Path) -> Iterator[Share]:
    """Yield the shares that have begun."""
    for path in sorted((output / SHARES_NAME).glob("*")):
        match = _NAME.fullmatch(path.name)
        if match and journaled_run(path) is not None:
            yield Share(int(match[1]), int(match[2]))


def _open_journal(plan: BundlePlan, share: Share, journal: Journal) -> None:
    """Resume an earlier run of this share, or begin; then clear what it left unfinished."""
    output, identity = plan.options.output_dir, plan.identity
    own = frozenset(job.key for job in jobs_of(plan.jobs, share))
    try:
        check_output(output, plan.options.run)
        if (output / MANIFEST_NAME).exists():
            raise finished_bundle(output)
        _check_others(plan, share)
        check_own(output, plan.files)
        resumes = plan.options.run.resume and not journal.is_empty
        if resumes:
            journal.resume(identity)
    except OutputExistsError:
        if journal.is_empty:
            _remove(plan, journal)
        raise
    if not resumes:
        journal.begin(identity, own)
        remove_downloads(journal.path.parent)
    remove_unfinished(output, own, kept=journal.finished.keys())


def _remove(plan: BundlePlan, journal: Journal) -> None:
    """Remove a share's journal, and with the last one what all shares have."""
    journal.remove()
    output = plan.options.output_dir
    if not any(path.is_dir() for path in (output / SHARES_NAME).glob("*")):
        (output / SHARES_NAME / _REQUEST_NAME).unlink(missing_ok=True)
        for folder in (*(output / part.name for part in plan.parts), output / SHARES_NAME, output):
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _check_others(plan: BundlePlan, share: Share) -> None:
    """Refuse to add a share to those of another bundle or another division (OutputExistsError)."""
    identity = json.loads(json.dumps(plan.identity))
    for other in _begun(plan.options.output_dir):
        if other.count != share.count:
            raise OutputExistsError(
                "The output folder holds shares of another division",
                where=plan.options.output_dir,
                expected=f"one of {other.count} shares, as share {other} is",
                found=f"--share {share}{share.said}",
                todo="Divide the work as the others did, or choose another --output-dir",
            )
        run = journaled_run(_room(plan, other))
        if other != share and run is not None and run.identity != identity:
            theirs, ours = first_difference(run.identity, identity)
            raise OutputExistsError(
                "The output folder holds shares of something else",
                where=plan.options.output_dir,
                expected=f"{theirs} (in share {other})",
                found=f"{ours} (now)",
                todo="Give every share the same options and the same, unchanged source; or choose"
                " another --output-dir",
            )


def _check_all_there(
    plan: BundlePlan, finished: Mapping[int, Mapping[str, ShardFacts]], count: int
) -> None:
    """Refuse to finish a bundle of which shares are missing (InvalidInputError naming them).

    finished is what each share that has begun has finished, by its number.
    """
    missing: dict[str, str] = {}
    for number, jobs in enumerate(_divided(plan.jobs, count), 1):
        share, own = Share(number, count), finished.get(number)
        if own is None:
            missing[str(share)] = "not begun"
            continue
        made = sum(is_made(job, own) for job in jobs)
        if made < len(jobs) or CHECKS not in own:
            owner = owner_of(_room(plan, share))
            running = "" if owner is None else f", by {owner}"
            missing[str(share)] = f"{made} of {len(jobs)} shards made{running}"
    if not missing:
        return
    named = [f"{share} ({state})" for share, state in missing.items()]
    more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    raise InvalidInputError(
        f"{len(missing)} of {count} shares {'is' if len(missing) == 1 else 'are'} missing",
        where=plan.options.output_dir,
        found=", ".join([*named[:_MOST_NAMED], *more]),
        todo="Run their commands again, with the same --share; then finish. What they finished"
        " is kept",
    )


def _retire(output: Path) -> None:
    """Give the shares' folder the name of something left over, so that it goes at once."""
    try:
        os.rename(output / SHARES_NAME, temporary_path(output / SHARES_NAME))
        sync_folder(output)
    except OSError as error:
        raise write_failure(output, error) from error


def _remove_left_overs(output: Path) -> None:
    try:
        remove_left_overs(output)
    except OSError as error:
        raise write_failure(output, error) from error
