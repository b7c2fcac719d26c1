"""Refusals of the Hub, one by one: kind, what is named, and nothing of what a server wrote."""

from __future__ import annotations

import socket
from types import SimpleNamespace

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

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources import hub_client
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub_client import HubClient
from mtp_checkpoints.sources.remote_failures import (
    CONTRADICTION,
    OTHER_BYTES,
    REPOSITORY_MOVED,
    STORAGE_GIVES_NOTHING,
)
from mtp_export.publish.repository import upload_failure

ENDPOINT = "https://hub.example"
WHERE = Address("hf://acme/tiny")
Kind = type[MtpExportError]


def answer(
    status: int, kind: type[HfHubHTTPError] = HfHubHTTPError, url: str = f"{ENDPOINT}/api"
) -> HfHubHTTPError:
    """An error as huggingface_hub raises it, with words that may be secret."""
    request = httpx2.Request("GET", f"{url}?signature=secret")
    return kind("secret words", response=httpx2.Response(status, request=request))


def full(status: int, words: str) -> HfHubHTTPError:
    """A refusal with the server's own words."""
    error = answer(status)
    error.server_message = words
    return error


def unknown_name() -> Exception:
    """The error of a lookup that failed, as the HTTP client wraps it."""
    try:
        try:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        except socket.gaierror as error:
            request = httpx2.Request("GET", f"{ENDPOINT}/api?signature=secret")
            raise httpx2.ConnectError("[Errno -3]", request=request) from error
    except httpx2.ConnectError as error:
        return error


def wrapped(error: Exception) -> RuntimeError:
    """An upload's error as huggingface_hub wraps it, twice."""
    inner, outer = RuntimeError("secret words"), RuntimeError("secret words")
    inner.__cause__, outer.__cause__ = error, inner
    return outer


def check(error: MtpExportError, kind: Kind, what: str, found: str) -> None:
    assert (type(error), error.what, error.where, error.found) == (kind, what, WHERE, found)
    assert error.todo and "secret" not in str(error)
    if what in ADVICE:
        assert (str(error.expected), error.todo) == ADVICE[what]


# By name: what is raised, and the kind of the refusal, what it says and what it found.
FAILURES: dict[str, tuple[Exception, Kind, str, str]] = {
    "gated": (
        answer(403, GatedRepoError), InvalidInputError, "The repository is gated", "HTTP 403"
    ),
    "no repository": (
        answer(401, RepositoryNotFoundError),
        InvalidInputError,
        "There is no such repository, or it is private",
        "HTTP 401",
    ),
    "no revision": (
        answer(404, RevisionNotFoundError),
        InvalidInputError,
        "The repository has no such revision",
        "HTTP 404",
    ),
    "no file": (
        answer(404, RemoteEntryNotFoundError),
        InvalidInputError,
        "The repository lacks a file that it lists",
        "HTTP 404",
    ),
    **{
        f"{status}": (
            answer(status), InvalidInputError, "The Hub refuses access", f"HTTP {status}"
        )
        for status in (401, 403, 404)
    },
    **{
        f"{status}": (answer(status), IoError, "The Hub answers with an error", f"HTTP {status}")
        for status in (402, 429, 500)
    },
    "offline": (
        OfflineModeIsEnabled("secret words"),
        IoError,
        "The Hub may not be asked: offline mode is switched on",
        "offline mode",
    ),
    **{
        f"{kind.__name__}({said!r})": (
            kind(said), IoError, "The Hub cannot be reached", said or kind.__name__
        )
        for kind in (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
        for said in ("no route", "")
    },
    "no name": (
        unknown_name(), IoError, "The Hub's name cannot be looked up", "no address for hub.example"
    ),
    **{
        f"broken off: {said!r}": (
            httpx2.ReadError(said),
            IoError,
            "The connection to the Hub broke off several times",
            said or "ReadError",
        )
        for said in ("reset by peer", "")
    },
}  # fmt: skip
UPLOADS: dict[str, tuple[Exception, Kind, str, str]] = {
    **{
        f"{status}": (
            answer(status),
            InvalidInputError,
            "The token may not write to this repository",
            f"HTTP {status}",
        )
        for status in (401, 403, 404)
    },
    **{
        f"{status}: {words}": (
            full(status, words),
            IoError,
            "The Hub has no room for this: the account's storage is used up",
            f"HTTP {status}",
        )
        for status in (402, 403, 413)
        for words in ("secret storage limit reached", "Secret Quota")
    },
    "no room on the Hub's side": (
        full(500, "secret storage"),
        IoError,
        "The Hub answers with an error",
        "HTTP 500",
    ),
    "a refusal of a restorage": (
        full(403, "secretstorage"),
        InvalidInputError,
        "The token may not write to this repository",
        "HTTP 403",
    ),
    "the storage's": (
        answer(403, url=f"{ENDPOINT}.elsewhere/bucket"),
        IoError,
        "The Hub's storage takes no bytes of a file",
        "HTTP 403",
    ),
    **{name: FAILURES[name] for name in ("500", "offline", "ConnectError('no route')")},
    "something else": (ValueError("secret words"), IoError, "An upload failed", "ValueError"),
    "no cause": (RuntimeError("secret words"), IoError, "An upload failed", "RuntimeError"),
}


AGAIN = "Run the same command again: an export goes on where it stopped"
LOG_IN = "log in with hf auth login, or set HF_TOKEN"
ATTEMPTS = "an answer within 6 attempts"
# By what an error says: what was expected, and what to do.
ADVICE: dict[str, tuple[str, str]] = {
    "The repository is gated": (
        "a token whose account has accepted its conditions",
        f"Accept them on its page on the Hub, then {LOG_IN}",
    ),
    "There is no such repository, or it is private": (
        "a public one, or a token that may read it",
        f"Check its name; for a private one {LOG_IN}",
    ),
    "The repository has no such revision": (
        "one of its branches, tags or commits after @",
        "See which it has on its page on the Hub, under Files and versions",
    ),
    "The repository lacks a file that it lists": (
        "every listed file",
        "Name another revision with @; if that fails too, tell the repository's owner",
    ),
    "The Hub refuses access": (
        "a repository that is public, or that the token may read",
        f"Check the name and the token: {LOG_IN}",
    ),
    "The Hub answers with an error": (ATTEMPTS, f"Wait a while. {AGAIN}"),
    "The Hub may not be asked: offline mode is switched on": (
        "HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE unset, or a folder",
        "Unset them, or point at a folder on this machine",
    ),
    "The Hub cannot be reached": (
        ATTEMPTS,
        f"Check the network, the proxy and HF_ENDPOINT. {AGAIN}",
    ),
    "The Hub's name cannot be looked up": (
        "an address for it within 2 attempts",
        f"Check the network, the DNS and HF_ENDPOINT. {AGAIN}",
    ),
    "The connection to the Hub broke off several times": (ATTEMPTS, f"Check the network. {AGAIN}"),
    "The Hub's storage serves no bytes of a file": (ATTEMPTS, f"Wait a while. {AGAIN}"),
    "The Hub's storage takes no bytes of a file": (ATTEMPTS, f"Wait a while. {AGAIN}"),
    "The token may not write to this repository": (
        "a token with write access to it, or to its organisation",
        f"Check the name, and use another token: {LOG_IN}",
    ),
    "The Hub has no room for this: the account's storage is used up": (
        "storage for all files of the bundle",
        "Delete what is not needed, or raise the limit in the account's settings on the Hub. Then"
        " run the same command again: what was uploaded stays there",
    ),
    "Somebody else changed the repository meanwhile": (
        "the commit that was looked at",
        "Nothing was committed. Run the same command again: what was uploaded stays there",
    ),
    "An upload failed": (
        "",
        f"{AGAIN}. Where the Hub's Xet storage cannot be reached, HF_HUB_DISABLE_XET=1"
        " uploads by plain HTTP",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_request_that_failed_for_good(name: str) -> None:
    error, *wanted = FAILURES[name]
    check(hub_client.failure(error, WHERE), *wanted)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_that_failed_for_good(name: str, is_wrapped: bool) -> None:
    error, *wanted = UPLOADS[name]
    given = wrapped(error) if is_wrapped else error
    check(upload_failure(given, WHERE, ENDPOINT), *wanted)


def test_answers_that_cannot_be_used() -> None:
    refused = CONTRADICTION.at(WHERE, "two sizes", expected="one size")
    check(refused, IoError, "The Hub does not answer as it should", "two sizes")
    unusable = OTHER_BYTES.at(WHERE, "HTTP 200", expected="bytes 1 to 2")
    words = "A server does not send the bytes that it was asked for"
    check(unusable, IoError, words, "HTTP 200")
    assert (refused.expected, unusable.expected) == ("one size", "bytes 1 to 2")
    words = "The Hub's storage serves no bytes of a file"
    check(STORAGE_GIVES_NOTHING.at(WHERE, "HTTP 403"), IoError, words, "HTTP 403")
    words = "Somebody else changed the repository meanwhile"
    check(REPOSITORY_MOVED.at(WHERE, "another commit"), IoError, words, "another commit")


@pytest.mark.parametrize(
    "error", [AttributeError(), KeyError("id"), RecursionError(), TypeError(), ValueError()]
)
def test_an_answer_that_is_no_repository(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reading it raises."""

    def json() -> None:
        raise error

    monkeypatch.setattr(HubClient, "answer", lambda client, url: SimpleNamespace(json=json))
    with pytest.raises(IoError) as refusal:
        HubClient("acme/tiny", WHERE, endpoint=ENDPOINT).info()
    found = f"another answer ({type(error).__name__})"
    check(refusal.value, IoError, "The Hub does not answer as it should", found)
