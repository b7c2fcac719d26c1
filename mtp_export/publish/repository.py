"""The repository that a bundle is pushed to: its state, and the requests that change it.

Requests are huggingface_hub's own. Large files go to the storage ahead of the one commit that makes
them part of the repository, so a push that ends at any moment leaves no half-uploaded model.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
)
from huggingface_hub.errors import (
    FileDuplicationError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.quiet import quieted
from mtp_checkpoints.sources import remote_failures as of
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub_client import NO_ACCESS, HubClient, RepositoryFile, failure
from mtp_export import __version__
from mtp_export.progress import ProgressCallback

BRANCH = constants.DEFAULT_REVISION
_EXISTS, _MOVED = 409, 412
_COPY_ROUTE = "/lfs-files/duplicate"
_REFUSALS = (402, 403, 413)  # that may be for want of room
_OF_ROOM = re.compile(r"\bstorage\b|\bquota\b", re.IGNORECASE)

Operation = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete
T = TypeVar("T")


class CopyRefused(Exception):
    """The Hub cannot copy files between these two repositories."""


@dataclass(frozen=True)
class State:
    """A repository at a commit of its branch; commit is None before the first one."""

    commit: str | None
    private: bool
    files: Mapping[str, RepositoryFile]


@dataclass(frozen=True)
class Repository:
    """A model's repository, which may not be there yet."""

    client: HubClient

    @property
    def name(self) -> str:
        return self.client.repo

    @property
    def address(self) -> Address:
        return self.client.address

    @property
    def api(self) -> HfApi:
        """The client library's own interface to the Hub."""
        endpoint = self.client.endpoint
        return HfApi(endpoint, library_name="mtp-export", library_version=__version__)

    def state(self) -> State | None:
        """Return the repository as it is now; None if there is none that this token may see."""
        try:
            info = self.client.info()
        except InvalidInputError as error:
            cause = error.__cause__
            if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
                return None
            raise
        commit = info.get("sha") or None
        return State(commit, bool(info.get("private")), self.files_at(commit) if commit else {})

    def files_at(self, commit: str) -> dict[str, RepositoryFile]:
        """Return the files of a commit by path (InvalidInputError, IoError)."""
        return {file.path: file for file in replace(self.client, commit=commit).tree()}

    def create(self, *, private: bool) -> State:
        """Make the repository.

        Raises InvalidInputError where the token may not, IoError; also where there is one by now.
        """
        api = self.api

        def attempt() -> None:
            try:
                api.create_repo(self.name, private=private)
            except HfHubHTTPError as error:
                if error.response.status_code == _EXISTS and self.state() is not None:
                    raise of.REPOSITORY_MOVED.at(self.address, "another commit") from error
                raise

        self._written(attempt)
        state = self.state()
        if state is None:
            raise of.NOT_WRITABLE.at(self.address, "a repository that cannot be seen")
        return state

    def takes_xet(self) -> bool:
        """Return whether large files go to the Hub's Xet storage.

        The client can if hf_xet is installed and not switched off. A server that has no such
        storage, as many mirrors, knows no tokens for it and gets files by the LFS protocol.
        """
        if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
            return False
        url = f"{self.client.endpoint}/api/models/{self.name}/xet-write-token/{BRANCH}"
        try:
            self.client.answer(url)
        except InvalidInputError as error:
            if _status(error.__cause__) == 404:
                return False
            raise _refusal(error.__cause__, self.address) from error
        return True

    def upload(self, operations: Sequence[CommitOperationAdd]) -> None:
        """Send what is for the storage of some files, and not in it; no commit lists them yet.

        Raises InvalidInputError where the token may not, IoError.
        """
        with _silent_client():
            try:
                self.api.preupload_lfs_files(
                    self.name, operations, revision=BRANCH, num_threads=1, free_memory=False
                )
            except Exception as error:  # of the library, of its compiled client and of the network
                where = self.address / operations[0].path_in_repo
                raise upload_failure(error, where, self.client.endpoint) from error

    def commit(self, operations: Sequence[Operation], message: str, parent: str | None) -> str:
        """Make one commit on top of another (None: of none), and return it.

        Raises CopyRefused, with nothing committed, if the Hub copies no files from their source;
        IoError if the branch is at another commit by now.
        """
        api = self.api

        def attempt() -> str:
            try:
                done = api.create_commit(
                    self.name,
                    operations,
                    commit_message=message,
                    revision=BRANCH,
                    parent_commit=parent,
                )
                return str(done.oid)
            except FileDuplicationError as error:
                raise CopyRefused from error
            except HfHubHTTPError as error:
                if error.response.request.url.path.endswith(_COPY_ROUTE):
                    raise CopyRefused from error
                if error.response.status_code == _MOVED:
                    raise of.REPOSITORY_MOVED.at(self.address, "another commit") from error
                raise

        with _silent_client():
            return self._written(attempt)

    def _written(self, attempt: Callable[[], T]) -> T:
        """Return what a request that changes the repository returns, or raise its failure."""
        try:
            return self.client.patiently(attempt, self.address)
        except InvalidInputError as error:
            raise _refusal(error.__cause__, self.address) from error
        except (ValueError, RuntimeError) as error:  # answers that huggingface_hub cannot read
            raise upload_failure(error, self.address, self.client.endpoint) from error


def _status(error: BaseException | None) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _refusal(error: BaseException | None, where: Address) -> MtpExportError:
    """Return the error of a write that the Hub refuses: to the token, or for want of room."""
    kind = of.ACCOUNT_IS_FULL if _tells_of_room(error) else of.NOT_WRITABLE
    return kind.at(where, f"HTTP {_status(error)}")


def _tells_of_room(error: BaseException | None) -> bool:
    """True for a refusal whose words, which are not repeated, are about the account's storage."""
    if not isinstance(error, HfHubHTTPError) or error.response.status_code not in _REFUSALS:
        return False
    return _OF_ROOM.search(error.server_message or "") is not None


def upload_failure(error: Exception, where: Address, endpoint: str) -> MtpExportError:
    """Return the error of an upload that failed for good; endpoint is the Hub's address."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub wraps what a file's upload raised
    if isinstance(error, HfHubHTTPError):
        status, url = error.response.status_code, str(error.response.request.url)
        if not url.startswith(f"{endpoint}/"):
            return of.STORAGE_TAKES_NOTHING.at(where, f"HTTP {status}")
        if status in NO_ACCESS or _tells_of_room(error):
            return _refusal(error, where)
    if isinstance(error, HfHubHTTPError | httpx2.RequestError | OfflineModeIsEnabled):
        return failure(error, where)
    return IoError(
        "An upload failed",
        where=where,
        found=type(error).__name__,
        todo=f"{of.AGAIN}. Where the Hub's Xet storage cannot be reached, HF_HUB_DISABLE_XET=1"
        " uploads by plain HTTP",
    )


class SentFile(io.BufferedReader):
    """A local file whose bytes are reported as they are read for the first time, to be sent."""

    def __init__(self, path: Path, progress: ProgressCallback) -> None:
        super().__init__(io.FileIO(path))
        self._progress, self.sent_bytes = progress, 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        new = self.tell() - self.sent_bytes
        if new > 0:
            self.sent_bytes += new
            self._progress(new)
        return data


@contextmanager
def _silent_client() -> Iterator[None]:
    """Keep huggingface_hub from printing: its lines hold signed addresses, its bars are many."""
    with quieted("huggingface_hub", logging.CRITICAL), disable_progress_bars():
        yield
