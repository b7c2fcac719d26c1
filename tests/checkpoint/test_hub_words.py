"""Refusals of the Hub, one by one: their kind, their words, and nothing of what a server wrote."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mtp_export.checkpoint import hub_failures
from mtp_export.checkpoint.byte_source import Address
from mtp_export.errors import InvalidInputError, IoError, MtpExportError

ENDPOINT = "https://hub.example"
WHERE = Address("hf://acme/tiny")
LOG_IN = "log in with hf auth login, or set HF_TOKEN"
AGAIN = "Run the same command again: it goes on where it stopped"


def answer(
    status: int, kind: type[HfHubHTTPError] = HfHubHTTPError, url: str = f"{ENDPOINT}/api"
) -> HfHubHTTPError:
    """An error as huggingface_hub raises it, with words that may be secret."""
    request = httpx2.Request("GET", f"{url}?signature=secret")
    return kind("secret words", response=httpx2.Response(status, request=request))


def wrapped(error: Exception) -> RuntimeError:
    """An upload's error as huggingface_hub wraps it, twice."""
    inner, outer = RuntimeError("secret words"), RuntimeError("secret words")
    inner.__cause__, outer.__cause__ = error, inner
    return outer


def check(error: MtpExportError, kind: type[MtpExportError], message: str) -> None:
    assert type(error) is kind
    assert str(error) == f"{message}."


FAILURES: dict[str, tuple[Exception, type[MtpExportError], str]] = {
    "gated": (
        answer(403, GatedRepoError),
        InvalidInputError,
        f"The repository is gated ({WHERE}). Accept its conditions on its page on the Hub, then"
        f" {LOG_IN}",
    ),
    "no repository": (
        answer(401, RepositoryNotFoundError),
        InvalidInputError,
        f"There is no such repository, or it is private ({WHERE}). Check its name; for a private"
        f" one {LOG_IN}",
    ),
    "no revision": (
        answer(404, RevisionNotFoundError),
        InvalidInputError,
        f"The repository has no such revision ({WHERE}). Check the branch, tag or commit after @",
    ),
    "no file": (
        answer(404, RemoteEntryNotFoundError),
        InvalidInputError,
        f"The repository lacks a file that it lists ({WHERE}). Check the revision, or name another"
        " with @",
    ),
    **{
        f"{status}": (
            answer(status),
            InvalidInputError,
            f"The Hub refuses access ({WHERE}). Found HTTP {status}. Check the name and the token:"
            f" {LOG_IN}",
        )
        for status in (401, 403, 404)
    },
    **{
        f"{status}": (
            answer(status),
            IoError,
            f"The Hub answers with an error ({WHERE}). Found HTTP {status}. {AGAIN}",
        )
        for status in (402, 429, 500)
    },
    "offline": (
        OfflineModeIsEnabled("secret words"),
        IoError,
        f"The Hub may not be asked: offline mode is switched on ({WHERE}). Unset HF_HUB_OFFLINE, or"
        " point at a folder on this machine",
    ),
    **{
        f"{kind.__name__}({said!r})": (
            kind(said),
            IoError,
            f"The Hub cannot be reached ({WHERE}). Found {said or kind.__name__}. Check the"
            f" network, the proxy and HF_ENDPOINT. {AGAIN}",
        )
        for kind in (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
        for said in ("no route", "")
    },
    **{
        f"broken off: {said!r}": (
            httpx2.ReadError(said),
            IoError,
            f"The connection to the Hub broke off several times ({WHERE}). Found"
            f" {said or 'ReadError'}. {AGAIN}",
        )
        for said in ("reset by peer", "")
    },
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_request_that_failed_for_good(name: str) -> None:
    error, kind, message = FAILURES[name]
    check(hub_failures.failure(error, WHERE), kind, message)


UPLOADS: dict[str, tuple[Exception, type[MtpExportError], str]] = {
    **{
        f"{status}": (
            answer(status),
            InvalidInputError,
            f"The token may not write to this repository ({WHERE}). Found HTTP {status}. Check the"
            " name, and use a token with write access to it: hf auth login, or HF_TOKEN",
        )
        for status in (401, 403, 404)
    },
    "the storage's": (
        answer(403, url=f"{ENDPOINT}.elsewhere/bucket"),
        IoError,
        f"The Hub's storage takes no bytes of a file ({WHERE}). Found HTTP 403. {AGAIN}",
    ),
    "500": (answer(500), IoError, FAILURES["500"][2]),
    "no route": (httpx2.ConnectError("no route"), IoError, FAILURES["ConnectError('no route')"][2]),
    "offline": (OfflineModeIsEnabled("x"), IoError, FAILURES["offline"][2]),
    "something else": (
        ValueError("secret words"),
        IoError,
        f"An upload failed ({WHERE}). Found ValueError. {AGAIN}. Where the Hub's Xet storage cannot"
        " be reached, HF_HUB_DISABLE_XET=1 uploads by plain HTTP",
    ),
    "no cause": (
        RuntimeError("secret words"),
        IoError,
        f"An upload failed ({WHERE}). Found RuntimeError. {AGAIN}. Where the Hub's Xet storage"
        " cannot be reached, HF_HUB_DISABLE_XET=1 uploads by plain HTTP",
    ),
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_that_failed_for_good(name: str, is_wrapped: bool) -> None:
    error, kind, message = UPLOADS[name]
    given = wrapped(error) if is_wrapped else error
    check(hub_failures.upload_failure(given, WHERE, ENDPOINT), kind, message)


def test_answers_that_cannot_be_used() -> None:
    check(
        hub_failures.storage_refuses(WHERE, 403),
        IoError,
        f"The Hub's storage serves no bytes of a file ({WHERE}). Found HTTP 403. {AGAIN}",
    )
    check(
        hub_failures.refused(WHERE, "two sizes"),
        IoError,
        f"The Hub contradicts itself ({WHERE}). Found two sizes. Run the same command again; if it"
        " fails again, check HF_ENDPOINT and the proxy",
    )
    check(
        hub_failures.unusable_range(WHERE, expected="bytes 1 to 2", found="HTTP 200"),
        IoError,
        f"A server does not send the bytes that it was asked for ({WHERE}). Expected bytes 1 to 2."
        " Found HTTP 200. A mirror or proxy without byte ranges may be on the way: check"
        " HF_ENDPOINT, or download the checkpoint and point at its folder",
    )
    check(
        hub_failures.repository_moved(WHERE),
        IoError,
        f"Somebody else changed the repository meanwhile ({WHERE}). Found another commit than the"
        " one that was looked at. Nothing was committed. Run the same command again: what was"
        " uploaded stays there",
    )
