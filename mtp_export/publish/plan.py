"""Plan of a push: what a repository gets of a bundle, and what of it the Hub has already."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from huggingface_hub import CommitOperationCopy, get_token

from mtp_checkpoints.errors import (
    InvalidInputError,
    IoError,
    OutputExistsError,
    UsageError,
    VerificationError,
)
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.files import read_failure
from mtp_checkpoints.sources.hub import model_uri
from mtp_checkpoints.sources.hub_client import HubClient, RepositoryFile
from mtp_checkpoints.tensors.manifest import manifest_sha256
from mtp_export.progress import ProgressCallback, ShowProgress, shortened
from mtp_export.publish.base_model import BaseModel, base_model
from mtp_export.publish.card import card_files
from mtp_export.publish.content import Content, Shard, read_content
from mtp_export.publish.options import PushOptions
from mtp_export.publish.repository import Repository, State
from mtp_export.verify.check import Status
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.files.checksums import READ_BY_ENGINES
from mtp_export.verify.report.reading import read_report
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.verdict import verdict_words

_HASHING_WORKERS = min(4, os.cpu_count() or 1)
_HASHED_BYTES = 1 << 20  # at once
_NAMED = 3


@dataclass(frozen=True)
class PushPlan:
    """A bundle, and the repository as it was found (state None: it is to be made).

    files are all but the shards. kept are the paths that the repository has with the same bytes,
    sources the files that the Hub copies shards from, by path, removed the paths of another model's
    files. digests are the SHA-256 of shards, as far as known. verdict is that of the report, None
    without one.
    """

    options: PushOptions
    repository: Repository
    content: Content
    base: BaseModel | None
    verdict: Status | None
    state: State | None
    files: Mapping[str, bytes]
    kept: frozenset[str]
    sources: Mapping[str, Source]
    removed: tuple[str, ...]
    digests: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of everything that the repository gets, by path."""
        shards = {shard.name: shard.size_bytes for shard in self.content.shards}
        return shards | {name: len(data) for name, data in self.files.items()}

    @property
    def uploads(self) -> tuple[str, ...]:
        """Paths whose bytes are sent, shards first."""
        return tuple(n for n in self.sizes if n not in self.kept and n not in self.sources)


@dataclass(frozen=True)
class Source:
    """A file of a commit that the Hub can copy; repository None: the one that is pushed to."""

    file: RepositoryFile
    repository: str | None
    commit: str

    def copy_to(self, name: str) -> CommitOperationCopy:
        """Return the part of a commit that makes the copy."""
        return CommitOperationCopy(
            src_path_in_repo=self.file.path,
            path_in_repo=name,
            src_revision=self.commit,
            src_repo_id=self.repository,
            src_repo_type=None if self.repository is None else "model",
        )


def plan_push(options: PushOptions, show_progress: ShowProgress, *, dry_run: bool) -> PushPlan:
    """Read the bundle, and find out what the repository lacks of it; nothing is changed.

    Raises what read_content and evidence raise, InvalidInputError without a token,
    OutputExistsError for a repository with another model or a public one, IoError.
    """
    repository = _repository(options.repository)
    content = read_content(options.bundle, options.part)
    report = evidence(options.bundle, options.report, unverified=options.unverified)
    state = _state(repository, private=options.private, dry_run=dry_run)
    base = base_model(options.base_model, content.manifest)
    files = {**content.files, **card_files(repository.name, content, base, report)}
    there = {} if state is None else state.files
    sources = _sources(repository.name, base, state)
    sizes = {source.file.size for source in sources.values()}
    digests = digests_of([s for s in content.shards if s.size_bytes in sizes], show_progress)
    kept = {name for name, digest in digests.items() if has_digest(there.get(name), digest)}
    kept |= {name for name, data in files.items() if has_bytes(there.get(name), data)}
    ours = {*files, *(shard.name for shard in content.shards)}
    removed = tuple(sorted(n for n in there.keys() - ours if n.endswith(READ_BY_ENGINES)))
    if not options.overwrite:
        _check_free(repository, [*removed, *sorted((ours & there.keys()) - kept)])
    return PushPlan(
        options=options,
        repository=repository,
        content=content,
        base=base,
        verdict=None if report is None else report.status,
        state=state,
        files=files,
        kept=frozenset(kept),
        sources={name: sources[digest] for name, digest in digests.items()
                 if digest in sources and name not in kept},
        removed=removed,
        digests=digests,
    )  # fmt: skip


def digests_of(shards: Sequence[Shard], show_progress: ShowProgress) -> dict[str, str]:
    """Return the SHA-256 of shards by their paths in the repository (IoError)."""
    with show_progress("checksums", sum(shard.size_bytes for shard in shards)) as progress:
        found = in_threads(
            lambda shard: sha256_of(shard.path, progress),
            shards,
            workers=_HASHING_WORKERS,
            size_bytes=lambda shard: shard.size_bytes,
        )
        return {shard.name: digest for shard, digest in zip(shards, found, strict=True)}


def sha256_of(path: Path, progress: ProgressCallback) -> str:
    """Return the SHA-256 of a file (IoError)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_HASHED_BYTES):
                digest.update(chunk)
                progress(len(chunk))
    except OSError as error:
        raise read_failure(path, error) from error
    return digest.hexdigest()


def has_digest(listed: RepositoryFile | None, sha256: str) -> bool:
    """Return whether the Hub lists a large file with this checksum."""
    return listed is not None and listed.sha256 == sha256


def has_bytes(listed: RepositoryFile | None, data: bytes) -> bool:
    """Return whether the Hub lists a file with the checksum and the size of these bytes."""
    return listed is not None and listed.size == len(data) and listed.has(data)


def _repository(address: Address) -> Repository:
    """Return the repository of org/name, hf://org/name or its web page."""
    text = address.text if "://" in address.text else f"hf://{address.text}"
    uri = model_uri(Address(text))
    if uri.revision or uri.path_in_repo:
        raise UsageError(
            "A push goes to the default branch and the top of a repository",
            where=address,
            expected="org/name",
            found=f"@{uri.revision}" if uri.revision else f"the folder {uri.path_in_repo}",
            todo="Leave out what follows the name",
        )
    return Repository(HubClient(uri.id, Address(f"hf://{uri.id}")))


def _state(repository: Repository, *, private: bool, dry_run: bool) -> State | None:
    """Return the repository as it is; refuse one that this push must not go to."""
    if not dry_run and not get_token():
        raise InvalidInputError(
            "There is no token to write to the Hub with",
            where=repository.address,
            todo="Log in with hf auth login, or set HF_TOKEN to a token with write access",
        )
    state = repository.state()
    if private and state is not None and not state.private:
        raise OutputExistsError(
            "The repository is public, and --private was asked for",
            where=repository.address,
            todo="Make it private on its page on the Hub, or push to a new one",
        )
    return state


def _sources(name: str, base: BaseModel | None, state: State | None) -> dict[str, Source]:
    """Return the large files that the Hub can copy into the repository, by SHA-256."""
    found: dict[str, Source] = {}
    if base is not None and base.name != name:
        found = {digest: Source(file, base.name, base.commit)
                 for digest, file in base.files.items()}  # fmt: skip
    if state is not None and state.commit is not None:
        found |= {file.sha256: Source(file, None, state.commit)
                  for file in state.files.values() if file.sha256}  # fmt: skip
    return found


def _check_free(repository: Repository, in_the_way: Sequence[str]) -> None:
    """Refuse a repository whose files this push would replace or remove (OutputExistsError)."""
    if not in_the_way:
        return
    raise OutputExistsError(
        "The repository has other files than those of this bundle",
        where=repository.address,
        found=shortened(in_the_way, _NAMED),
        todo="Push to a new repository; or replace them with --overwrite, which removes those of"
        " another model too. The repository's history keeps them",
    )


_REPORT = Path("report.json")  # its name where none is given


def evidence(bundle: Path, report: Path | None, *, unverified: bool) -> Report | None:
    """Return the report of a bundle's verification; None without one, if that is wanted.

    Raises UsageError without a report, InvalidInputError for one of another bundle and
    VerificationError for one that did not pass. unverified allows no report, or one that failed.
    """
    verify = f"mtp-export verify {quote(str(bundle))} --report {quote(str(report or _REPORT))}"
    if report is None:
        if unverified:
            return None
        raise UsageError(
            "Nothing says that this bundle is verified",
            where=bundle,
            expected="--report FILE.json, the report of its verification",
            todo=f"Verify it first: {verify}. Or push it with --unverified, which the model card"
            " then says",
        )
    if not report.exists():
        raise IoError(
            "The report cannot be read",
            where=report,
            found="no such file",
            todo=f"Verify the bundle, which writes it: {verify}",
        )
    found = read_report(report)
    named, own = found.facts.get("manifest_sha256"), manifest_sha256(bundle)
    if named != own:
        raise InvalidInputError(
            "The report is about another bundle, or about this one before it was made again",
            where=report,
            expected=f"the SHA-256 of its manifest, {own}",
            found=str(named)[:64],
            todo="Verify this bundle, and give that report",
        )
    if found.status is not Status.PASS and not unverified:
        raise VerificationError(
            "The bundle did not pass its verification",
            where=report,
            found=verdict_words(found).rstrip("."),
            todo="Mend the bundle and verify it again; --unverified pushes it all the same, and the"
            " model card then says that it failed",
        )
    return found
