"""Failures of the Hub as errors for people. None repeats what a server wrote, nor an address that
is signed: they may hold secrets."""

from __future__ import annotations

from typing import NamedTuple

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.transfers import RETRIES

_AGAIN = "Run the same command again: it goes on where it stopped"
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_NO_ACCESS = (401, 403, 404)

_ATTEMPTS = f"an answer within {RETRIES + 1} attempts"


class _Answer(NamedTuple):
    """Meaning of an error of the Hub, what was expected instead, and what to do."""

    what: str
    expected: str
    todo: str


# Gated and private come before what they are kinds of.
_ANSWERS: dict[type[HfHubHTTPError], _Answer] = {
    GatedRepoError: _Answer(
        "The repository is gated",
        "a token whose account has accepted its conditions",
        f"Accept them on its page on the Hub, then {_LOG_IN}",
    ),
    RepositoryNotFoundError: _Answer(
        "There is no such repository, or it is private",
        "a public one, or a token that may read it",
        f"Check its name; for a private one {_LOG_IN}",
    ),
    RevisionNotFoundError: _Answer(
        "The repository has no such revision",
        "one of its branches, tags or commits after @",
        "See which it has on its page on the Hub, under Files and versions",
    ),
    RemoteEntryNotFoundError: _Answer(
        "The repository lacks a file that it lists",
        "every listed file",
        "Name another revision with @; if that fails too, tell the repository's owner",
    ),
}


def failure(error: Exception, where: Address) -> MtpExportError:
    """Return the error of a request that failed for good."""
    if isinstance(error, OfflineModeIsEnabled):
        return IoError(
            "The Hub may not be asked: offline mode is switched on",
            where=where,
            expected="HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE unset, or a folder",
            found="offline mode",
            todo="Unset them, or point at a folder on this machine",
        )
    if isinstance(error, HfHubHTTPError):
        return _answered(error, where)
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return IoError(
            "The Hub cannot be reached",
            where=where,
            expected=_ATTEMPTS,
            found=reason,
            todo=f"Check the network, the proxy and HF_ENDPOINT. {_AGAIN}",
        )
    return IoError(
        "The connection to the Hub broke off several times",
        where=where,
        expected=_ATTEMPTS,
        found=reason,
        todo=f"Check the network. {_AGAIN}",
    )


def _answered(error: HfHubHTTPError, where: Address) -> MtpExportError:
    status = error.response.status_code
    found = f"HTTP {status}"
    for kind, answer in _ANSWERS.items():
        if isinstance(error, kind):
            return InvalidInputError(
                answer.what, where=where, expected=answer.expected, found=found, todo=answer.todo
            )
    if status in _NO_ACCESS:
        return InvalidInputError(
            "The Hub refuses access",
            where=where,
            expected="a repository that is public, or that the token may read",
            found=found,
            todo=f"Check the name and the token: {_LOG_IN}",
        )
    return IoError(
        "The Hub answers with an error",
        where=where,
        expected=_ATTEMPTS,
        found=found,
        todo=f"Wait a while. {_AGAIN}",
    )


def storage_refuses(where: Address, status: int) -> IoError:
    """Return the error of a storage that serves no bytes, not even by a new link."""
    return IoError(
        "The Hub's storage serves no bytes of a file",
        where=where,
        expected=_ATTEMPTS,
        found=f"HTTP {status}",
        todo=f"Wait a while. {_AGAIN}",
    )


def refused(where: Address, *, expected: str, found: str) -> IoError:
    """Return the error of an answer of the Hub that contradicts what it said, or its own routes."""
    return IoError(
        "The Hub does not answer as it should",
        where=where,
        expected=expected,
        found=found,
        todo="Run the same command again; if it fails again, check HF_ENDPOINT and the proxy",
    )


def unusable_range(where: Address, *, expected: str, found: str) -> IoError:
    """Return the error of a server that sends other bytes than it was asked for."""
    return IoError(
        "A server does not send the bytes that it was asked for",
        where=where,
        expected=expected,
        found=found,
        todo="A mirror or proxy without byte ranges may be on the way: check HF_ENDPOINT, or"
        " download the checkpoint and point at its folder",
    )


def not_writable(where: Address, found: str) -> InvalidInputError:
    """Return the error of a repository that the token may not change."""
    return InvalidInputError(
        "The token may not write to this repository",
        where=where,
        expected="a token with write access to it, or to its organisation",
        found=found,
        todo=f"Check the name, and use another token: {_LOG_IN}",
    )


def repository_moved(where: Address) -> IoError:
    """Return the error of a commit on a branch that somebody else changed meanwhile."""
    return IoError(
        "Somebody else changed the repository meanwhile",
        where=where,
        expected="the commit that was looked at",
        found="another commit",
        todo="Nothing was committed. Run the same command again: what was uploaded stays there",
    )


def upload_failure(error: Exception, where: Address, endpoint: str) -> MtpExportError:
    """Return the error of an upload that failed for good; endpoint is the Hub's address."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub wraps what a file's upload raised
    if isinstance(error, HfHubHTTPError):
        status, url = error.response.status_code, str(error.response.request.url)
        if not url.startswith(f"{endpoint}/"):
            return IoError(
                "The Hub's storage takes no bytes of a file",
                where=where,
                expected=_ATTEMPTS,
                found=f"HTTP {status}",
                todo=f"Wait a while. {_AGAIN}",
            )
        if status in _NO_ACCESS:
            return not_writable(where, f"HTTP {status}")
    if isinstance(error, HfHubHTTPError | httpx2.RequestError | OfflineModeIsEnabled):
        return failure(error, where)
    return IoError(
        "An upload failed",
        where=where,
        found=type(error).__name__,
        todo=f"{_AGAIN}. Where the Hub's Xet storage cannot be reached, HF_HUB_DISABLE_XET=1"
        " uploads by plain HTTP",
    )
