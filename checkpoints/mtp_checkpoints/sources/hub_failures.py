"""Kinds of failures that errors of huggingface_hub and of its HTTP client stand for."""

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

from mtp_checkpoints.errors import IoError, MtpExportError
from mtp_checkpoints.sources import remote_failures as of
from mtp_checkpoints.sources.byte_source import Address

_UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
_NO_ACCESS = (401, 403, 404)
# Gated and private come before what they are kinds of.
_ANSWERS: dict[type[HfHubHTTPError], of.Failure] = {
    GatedRepoError: of.GATED,
    RepositoryNotFoundError: of.NO_REPOSITORY,
    RevisionNotFoundError: of.NO_REVISION,
    RemoteEntryNotFoundError: of.NO_FILE,
}


def failure(error: Exception, where: Address) -> MtpExportError:
    """Return the error of a request that failed for good."""
    if isinstance(error, OfflineModeIsEnabled):
        return of.OFFLINE.at(where, "offline mode")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        other = of.NO_ACCESS if status in _NO_ACCESS else of.ERROR_STATUS
        known = (answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))
        return next(known, other).at(where, f"HTTP {status}")
    kind = of.UNREACHABLE if isinstance(error, _UNREACHABLE) else of.BROKEN_OFF
    return kind.at(where, str(error) or type(error).__name__)


def upload_failure(error: Exception, where: Address, endpoint: str) -> MtpExportError:
    """Return the error of an upload that failed for good; endpoint is the Hub's address."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub wraps what a file's upload raised
    if isinstance(error, HfHubHTTPError):
        status, url = error.response.status_code, str(error.response.request.url)
        if not url.startswith(f"{endpoint}/"):
            return of.STORAGE_TAKES_NOTHING.at(where, f"HTTP {status}")
        if status in _NO_ACCESS:
            return of.NOT_WRITABLE.at(where, f"HTTP {status}")
    if isinstance(error, HfHubHTTPError | httpx2.RequestError | OfflineModeIsEnabled):
        return failure(error, where)
    return IoError(
        "An upload failed",
        where=where,
        found=type(error).__name__,
        todo=f"{of.AGAIN}. Where the Hub's Xet storage cannot be reached, HF_HUB_DISABLE_XET=1"
        " uploads by plain HTTP",
    )
