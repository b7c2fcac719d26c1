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
