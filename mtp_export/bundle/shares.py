"""Shares of a bundle: runs of one command, on one machine or many, that make different shards of it
in one folder, and their end.

Each share has a folder with its own journal, lock, owner and downloads, and writes no other's
files. Until the end nothing beside the shards is written, so nothing looks whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, IoError, UsageError
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.files import (
    read_failure,
    sync_folder,
    temporary_path,
    write_failure,
    write_json,
)
from mtp_export.bundle.build import (
    BundleResult,
    Maker,
    Work,
    facts_of,
    make_shards,
    run_bundle,
    write_rest,
)
from mtp_export.bundle.bundle_plan import BundlePlan, jobs_of
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.journal import Journal, JournalContent, ShardFacts, journaled
from mtp_export.bundle.options import Share
from mtp_export.bundle.owner import PATIENCE_SECONDS, is_owned, owner_of
from mtp_export.bundle.request import Request, restored
from mtp_export.bundle.run import Record, is_made
from mtp_export.bundle.run_folder import (
    REQUEST_NAME,
    SHARES_NAME,
    begun_shares,
    check_own,
    is_finished,
    remove_left_overs,
    remove_unfinished,
    room_of,
)
from mtp_export.progress import ProgressCallback, shortened

_MOST_NAMED = 12
_POLL_SECONDS = 0.5


def run_share(
    request: Request, plan: BundlePlan, progress: ProgressCallback, make: Maker | None = None
) -> BundleResult:
    """Make the shards of the share that a request asks for, as run_bundle does, beside a record of
    the request that finish_shares plans by. make as run_bundle takes it."""

    def make_recorded(
        plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback
    ) -> None:
        write_json(plan.options.output_dir / SHARES_NAME / REQUEST_NAME, request.recorded())
        (make or make_shards)(plan, work, record, progress)

    return run_bundle(plan, progress, make_recorded)


def await_part(plan: BundlePlan, part: str) -> None:
    """Wait for the shards of a part that other shares than a plan's are making.

    Raises IoError, after which the same command goes on, naming shares without theirs that nobody
    makes, once PATIENCE_SECONDS have passed.
    """
    own, output = plan.options.run.share, plan.options.output_dir
    if own is None:
        return
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        begun = {share.number: journaled(room_of(output, share)) for share in begun_shares(output)}
        finished = {number: one.finished for number, one in begun.items() if one is not None}
        missing = _unmade(plan, finished, own.count, part)
        if not missing:
            return
        if any(is_owned(room_of(output, share)) for share in missing):
            end = time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() >= end:
            raise IoError(
                f"This share goes on beside the whole {part} part, of which shards are missing",
                where=output,
                expected="the other shares to have made theirs, or to run",
                found=_named(missing),
                todo="Run their commands, and this one again: it goes on where it stopped",
            )
        time.sleep(_POLL_SECONDS)


def finish_shares(plan: BundlePlan) -> BundleResult:
    """Write what makes a bundle of finished shares whole.

    Raises InvalidInputError naming the shares that are missing or unfinished, OutputExistsError
    for one that is still running or was made of something else, or IoError.
    """
    start, output = time.monotonic(), plan.options.output_dir
    count = share_count(output)
    begun = {share.number: room_of(output, share) for share in begun_shares(output)}
    before = {number: journaled(room) for number, room in begun.items()}
    _check_all_there(plan, {n: one.finished if one else {} for n, one in before.items()}, count)
    with ExitStack() as opened:
        journals = {n: opened.enter_context(Journal(room)) for n, room in begun.items()}
        for number, journal in journals.items():
            journal.resume(plan.identity, output, Share(number, count))
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
    path = output / SHARES_NAME / REQUEST_NAME
    try:
        return restored(strict_json.parse(path.read_bytes()), output, share)
    except OSError as error:
        raise read_failure(path, error) from error
    except (
        *(AttributeError, KeyError, TypeError, ValueError, RecursionError),
        UsageError,  # of options that check their bounds
    ) as error:
        raise InvalidInputError(
            "What the shares were asked for cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            todo="Run any one of them again, with the same --share: it writes the file anew",
        ) from None


def shared_plan(request: Request) -> BundlePlan:
    """Plan the bundle of shares by their request (MtpExportError): options that no command takes
    are damage."""
    try:
        return request.plan()
    except UsageError as error:
        raise InvalidInputError(
            "What the shares were asked for is no bundle",
            where=request.bundle.output_dir / SHARES_NAME / REQUEST_NAME,
            found=error,
            todo="Run any one of them again, with the same --share: it writes the file anew",
        ) from None


def share_count(output: Path) -> int:
    """Return how many shares a folder's bundle is divided into (InvalidInputError if it has
    none)."""
    count = next((share.count for share in begun_shares(output)), None)
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


@dataclass(frozen=True)
class Division:
    """Shares of an unfinished bundle by what their journals say: run is that of one of them, and
    missing are the shares, of count, that have not ended."""

    run: JournalContent
    count: int
    missing: Sequence[Share]


def division_of(output: Path) -> Division | None:
    """Return how far the shares in a folder are, None where it has none (IoError)."""
    rooms = {share: journaled(room_of(output, share)) for share in begun_shares(output)}
    begun = {share: room for share, room in rooms.items() if room is not None}
    if not begun:
        return None
    (first, one), *_ = begun.items()
    ended = {share.number for share, room in begun.items() if CHECKS in room.finished}
    numbers = [number for number in range(1, first.count + 1) if number not in ended]
    return Division(one, first.count, [Share(number, first.count) for number in numbers])


def _check_all_there(
    plan: BundlePlan, finished: Mapping[int, Mapping[str, ShardFacts]], count: int
) -> None:
    """Refuse to finish a bundle of which shares are missing (InvalidInputError naming them).

    finished is what each share that has begun has finished, by its number.
    """
    missing = _unmade(plan, finished, count)
    if not missing:
        return
    raise InvalidInputError(
        f"{len(missing)} of {count} shares {'is' if len(missing) == 1 else 'are'} missing",
        where=plan.options.output_dir,
        found=_named(missing),
        todo="Run their commands again, with the same --share; then finish. What they finished"
        " is kept",
    )


def _unmade(
    plan: BundlePlan,
    finished: Mapping[int, Mapping[str, ShardFacts]],
    count: int,
    part: str | None = None,
) -> dict[Share, str]:
    """Return how far those of count shares are, in words, that have not ended; of a part, that have
    not made their shards of it. finished as in _check_all_there."""
    missing: dict[Share, str] = {}
    for number in range(1, count + 1):
        share, own = Share(number, count), finished.get(number, {})
        jobs = jobs_of(plan.jobs, share)
        if part is not None:
            jobs = [job for job in jobs if job.key.startswith(f"{part}/")]
        made = sum(is_made(job, own) for job in jobs)
        if made == len(jobs) and (part is not None or CHECKS in own):
            continue
        owner = owner_of(room_of(plan.options.output_dir, share))
        running = "" if owner is None else f", by {owner}"
        begun = f"{made} of {len(jobs)} shards made{running}"
        missing[share] = begun if number in finished else "not begun"
    return missing


def _named(missing: Mapping[Share, str]) -> str:
    return shortened([f"{share} ({state})" for share, state in missing.items()], _MOST_NAMED)


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
