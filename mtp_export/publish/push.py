"""Run of a push: shards go to the Hub's storage one by one, then one commit makes them and all
other files part of the repository, then what the Hub lists is compared with what was pushed."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from mtp_checkpoints.errors import IoError, MtpExportError, VerificationError
from mtp_checkpoints.sources.hub_client import RepositoryFile
from mtp_export.progress import ProgressCallback, ShowProgress
from mtp_export.publish.content import Shard
from mtp_export.publish.plan import PushPlan, digests_of, has_bytes, has_digest
from mtp_export.publish.repository import CopyRefused, Operation, SentFile, State


@dataclass(frozen=True)
class PushResult:
    """A finished push: its plan as it was carried out, and the commit that lists the bundle."""

    plan: PushPlan
    commit: str
    seconds: float


def run_push(plan: PushPlan, show_progress: ShowProgress) -> PushResult:
    """Carry a plan out: the repository gets all of it, or nothing.

    Raises InvalidInputError where the token may not write or the bundle changes, IoError, and
    VerificationError if the Hub lists other files in the end.
    """
    start = time.monotonic()
    state = plan.state or plan.repository.create(private=plan.options.private)
    commit = state.commit
    if plan.uploads or plan.sources or plan.removed:
        plan = _with_all_digests(plan, show_progress)
        plan, commit = _pushed(plan, state, show_progress)
    assert commit is not None, "what the repository has is in a commit"
    _check_listed(plan, plan.repository.files_at(commit))
    return PushResult(plan, commit, time.monotonic() - start)


def _with_all_digests(plan: PushPlan, show_progress: ShowProgress) -> PushPlan:
    missing = [shard for shard in plan.content.shards if shard.name not in plan.digests]
    return replace(plan, digests={**plan.digests, **digests_of(missing, show_progress)})


def _pushed(plan: PushPlan, state: State, show_progress: ShowProgress) -> tuple[PushPlan, str]:
    """Upload and commit; return the plan as it was carried out, and the commit."""
    is_xet = plan.repository.takes_xet()
    sent: dict[str, CommitOperationAdd] = {}
    while True:
        shards = [s for s in plan.content.shards if s.name in plan.uploads and s.name not in sent]
        with show_progress("upload", sum(shard.size_bytes for shard in shards)) as progress:
            for shard in shards:
                sent[shard.name] = _sent_shard(plan, shard, is_xet=is_xet, progress=progress)
        sent |= _sent_files(plan, plan.files.keys() - plan.kept - sent.keys(), is_xet=is_xet)
        plan.content.check_unchanged()
        removed = [CommitOperationDelete(name, is_folder=False) for name in plan.removed]
        copies = [source.copy_to(name) for name, source in plan.sources.items()]
        try:
            return plan, _committed(plan, state, [*removed, *copies, *sent.values()])
        except CopyRefused:  # so their bytes are sent from here
            plan = replace(plan, sources={})


def _sent_files(
    plan: PushPlan, names: Collection[str], *, is_xet: bool
) -> dict[str, CommitOperationAdd]:
    """Upload those of some files that are for the storage; return their parts of the commit."""
    sent: dict[str, CommitOperationAdd] = {}
    left = set(names)
    while left:
        # Equal files go one after the other: huggingface_hub would read one of them twice at once.
        batch = {plan.files[name]: name for name in sorted(left)}
        sent |= {name: CommitOperationAdd(name, data if is_xet else io.BytesIO(data))
                 for data, name in batch.items()}  # fmt: skip
        plan.repository.upload([sent[name] for name in batch.values()])
        left -= sent.keys()
    return sent


def _sent_shard(
    plan: PushPlan, shard: Shard, *, is_xet: bool, progress: ProgressCallback
) -> CommitOperationAdd:
    """Upload a shard; return its part of the commit.

    Without Xet it is given as an open file: so huggingface_hub is told.
    """
    operation = CommitOperationAdd(shard.name, shard.path)
    operation.upload_info.sha256 = bytes.fromhex(plan.digests[shard.name])
    try:
        if is_xet:
            plan.repository.upload([operation])
            progress(shard.size_bytes)
        else:
            with SentFile(shard.path, progress) as file:
                operation.path_or_fileobj = file
                plan.repository.upload([operation])
                progress(shard.size_bytes - file.sent_bytes)
            operation.path_or_fileobj = str(shard.path)
    except MtpExportError:
        shard.check_unchanged()  # a storage refuses what has another checksum than it had
        raise
    return operation


def _committed(plan: PushPlan, state: State, operations: Sequence[Operation]) -> str:
    """Make the commit and return it; one whose answer was lost is found."""
    message = f"Push {' and '.join(plan.content.parts)} with mtp-export"
    try:
        return plan.repository.commit(operations, message, state.commit)
    except IoError:
        now = plan.repository.state()
        if now is None or now.commit is None or _wrong(plan, now.files):
            raise
        return now.commit


def _wrong(plan: PushPlan, listed: Mapping[str, RepositoryFile]) -> list[str]:
    """Return the paths of what the Hub does not list with their sizes and checksums here."""
    sizes = plan.sizes
    wrong = [
        name
        for name, digest in plan.digests.items()
        if not has_digest(listed.get(name), digest) or listed[name].size != sizes[name]
    ]
    wrong += [name for name, data in plan.files.items() if not has_bytes(listed.get(name), data)]
    return wrong + [name for name in plan.removed if name in listed]


def _check_listed(plan: PushPlan, listed: Mapping[str, RepositoryFile]) -> None:
    """Compare the commit with the local files (VerificationError)."""
    wrong = _wrong(plan, listed)
    if wrong:
        raise VerificationError(
            "The repository does not hold what was pushed",
            where=plan.repository.address / wrong[0],
            expected="the size and the checksum of every local file",
            found=f"{len(wrong)} of {len(plan.sizes)} files missing or with others",
            todo="Do not use this repository; run the same command again with --overwrite",
        )
