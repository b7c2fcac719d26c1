"""Failures of the Hub as errors for people. None repeats what a server wrote, nor an address that
is signed: they may hold secrets."""

from __future__ import annotations

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mtp_export.checkpoint.byte_source import Address
from mtp_export.errors import InvalidInputError, IoError, MtpExportError

_AGAIN = "Run the same command again: it goes on where it stopped"
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_NO_ACCESS = (401, 403, 404)

# Gated and private come before what they are kinds of.
_ANSWERS: tuple[tuple[type[HfHubHTTPError], str, str], ...] = (
    (
        GatedRepoError,
        "The repository is gated",
        f"Accept its conditions on its page on the Hub, then {_LOG_IN}",
    ),
    (
        RepositoryNotFoundError,
        "There is no such repository, or it is private",
        f"Check its name; for a private one {_LOG_IN}",
    ),
    (
        RevisionNotFoundError,
        "The repository has no such revision",
        "Check the branch, tag or commit after @",
    ),
    (
        RemoteEntryNotFoundError,
        "The repository lacks a file that it lists",
        "Check the revision, or name another with @",
    ),
)


def failure(error: Exception, where: Address) -> MtpExportError:
    """Return the error of a request that failed for good."""
    if isinstance(error, OfflineModeIsEnabled):
        return IoError(
            "The Hub may not be asked: offline mode is switched on",
            where=where,
            todo="Unset HF_HUB_OFFLINE, or point at a folder on this machine",
        )
    for kind, what, todo in _ANSWERS:
        if isinstance(error, kind):
            return InvalidInputError(what, where=where, todo=todo)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in _NO_ACCESS:
            return InvalidInputError(
                "The Hub refuses access",
                where=where,
                found=f"HTTP {status}",
                todo=f"Check the name and the token: {_LOG_IN}",
            )
        return IoError(
            "The Hub answers with an error", where=where, found=f"HTTP {status}", todo=_AGAIN
        )
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return IoError(
            "The Hub cannot be reached",
            where=where,
            found=str(error) or type(error).__name__,
            todo=f"Check the network, the proxy and HF_ENDPOINT. {_AGAIN}",
        )
    return IoError(
        "The connection to the Hub broke off several times",
        where=where,
        found=str(error) or type(error).__name__,
        todo=_AGAIN,
    )


def storage_refuses(where: Address, status: int) -> IoError:
    """Return the error of a storage that serves no bytes, not even by a new link."""
    return IoError(
        "The Hub's storage serves no bytes of a file",
        where=where,
        found=f"HTTP {status}",
        todo=_AGAIN,
    )


def refused(where: Address, found: str) -> IoError:
    """Return the error of an answer of the Hub that contradicts itself."""
    return IoError(
        "The Hub contradicts itself",
        where=where,
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
        found=found,
        todo="Check the name, and use a token with write access to it: hf auth login, or HF_TOKEN",
    )


def repository_moved(where: Address) -> IoError:
    """Return the error of a commit on a branch that somebody else changed meanwhile."""
    return IoError(
        "Somebody else changed the repository meanwhile",
        where=where,
        found="another commit than the one that was looked at",
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
                found=f"HTTP {status}",
                todo=_AGAIN,
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
