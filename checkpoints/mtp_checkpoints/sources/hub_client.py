"""Requests to one repository of the Hub, through huggingface_hub's HTTP client.

Every answer is checked: a range must come as exactly that range, a whole file with the checksum
that the repository lists. Transfers that break off go on where they stopped.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urljoin, urlsplit

import httpcore2
import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    parse_ratelimit_headers,
)

from mtp_checkpoints import __version__
from mtp_checkpoints.errors import IoError, MtpExportError
from mtp_checkpoints.sources import remote_failures as of
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.transfers import AttemptFailed, Pause, Sink, patiently, transfer

_TRANSIENT = {408, 429, 500, 502, 503, 504}
_NETWORK = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
)
_UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
NO_ACCESS = (401, 403, 404)
# Headers by which the Hub says of which file it gives a link.
_FACTS = {
    "commit": constants.HUGGINGFACE_HEADER_X_REPO_COMMIT,
    "size": constants.HUGGINGFACE_HEADER_X_LINKED_SIZE,
    "checksum": constants.HUGGINGFACE_HEADER_X_LINKED_ETAG,
}
# Gated and private come before what they are kinds of.
_ANSWERS: dict[type[HfHubHTTPError], of.Failure] = {
    GatedRepoError: of.GATED,
    RepositoryNotFoundError: of.NO_REPOSITORY,
    RevisionNotFoundError: of.NO_REVISION,
    RemoteEntryNotFoundError: of.NO_FILE,
}
# Of huggingface_hub and of Python, when they read an answer that is not as the Hub's own are.
_UNREADABLE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
T = TypeVar("T")

# Of one read of a socket. By the default of 64 KiB the steps of the HTTP parser cost as much as the
# transfer; a copy of much more than this leaves the processor's cache. It holds for every client of
# the process, as there is no public way to set it for one: httpx2.HTTPTransport takes neither this
# size nor httpcore2's network_backend, and keeps its pool private; a transport over a pool of our
# own would have to do its proxies, TLS settings and errors again, which are private too.
httpcore2.HTTP11Connection.READ_NUM_BYTES = 256 << 10


class _BadStatus(Exception):
    """An answer of the storage that is neither the bytes nor an error of the Hub itself."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(f"HTTP {response.status_code}")
        self.response = response


class _Cut(Exception):
    """A body that ended too early."""


_FAILURES = (
    *(httpx2.RequestError, httpx2.InvalidURL, HfHubHTTPError),
    *(OfflineModeIsEnabled, _BadStatus, _Cut),
)


def failure(error: Exception, where: Address) -> MtpExportError:
    """Return the error of a request that failed for good."""
    if isinstance(error, OfflineModeIsEnabled):
        return of.OFFLINE.at(where, "offline mode")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        other = of.NO_ACCESS if status in NO_ACCESS else of.ERROR_STATUS
        known = (answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))
        return next(known, other).at(where, f"HTTP {status}")
    if _is_unknown_name(error):
        return of.UNKNOWN_NAME.at(where, f"no address for {_host(error)}")
    kind = of.UNREACHABLE if isinstance(error, _UNREACHABLE) else of.BROKEN_OFF
    return kind.at(where, str(error) or type(error).__name__)


@contextmanager
def _attempt(where: Address) -> Iterator[None]:
    """Make one attempt of the requests in the block (AttemptFailed)."""
    try:
        yield
    except _FAILURES as error:
        raise _failed(error, where) from error


def _failed(error: Exception, where: Address) -> AttemptFailed:
    if not isinstance(error, HfHubHTTPError | _BadStatus):
        is_unknown = _is_unknown_name(error)
        words = "name not known" if is_unknown else type(error).__name__
        return AttemptFailed(
            failure(error, where),
            server=_host(error),
            cause=str(error) if isinstance(error, _Cut) else words,
            is_final=not isinstance(error, (*_NETWORK, _Cut)),
            is_unknown_name=is_unknown,
        )
    response, is_bad = error.response, isinstance(error, _BadStatus)
    server, status = _host(error), f"HTTP {response.status_code}"
    refusal = of.STORAGE_GIVES_NOTHING.at(where, status)
    said = refusal if is_bad else failure(error, where)
    if response.status_code in _TRANSIENT:
        told_seconds = _told_seconds(response.headers)
        return AttemptFailed(said, server=server, cause=status, told_seconds=told_seconds)
    # A link to the storage has expired, and is signed anew; the Hub's own word is final.
    return AttemptFailed(said, server=server, cause=status, is_final=not is_bad)


def _is_unknown_name(error: BaseException | None) -> bool:
    """Return True for an error that a failed lookup of a name led to."""
    seen = 0
    while error is not None and seen < 16:
        if isinstance(error, socket.gaierror):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _host(error: Exception) -> str:
    """Return the server that a request went to."""
    asked: Any = getattr(error, "response", error)
    try:
        return str(asked.request.url.host)
    except (AttributeError, RuntimeError):  # an error that names no request
        return urlsplit(hub_endpoint()).hostname or "the Hub"


def _told_seconds(headers: Mapping[str, str]) -> float:
    """Return the time that a server asks to wait."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    after = headers.get("retry-after", "").strip()
    return float(after) if after.isdigit() else 0.0


def hub_endpoint() -> str:
    """Return the address of the Hub, or of a mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


class RepositoryFile(NamedTuple):
    """A file of a commit, as the Hub lists it: its size in bytes and its checksum, which is SHA-256
    of one in the storage for large files, and git's of any other's blob. xet_hash is that of a file
    in Xet's storage, else None."""

    path: str
    size: int
    blob_id: str
    sha256: str | None = None
    xet_hash: str | None = None

    def has(self, data: bytes) -> bool:
        """Return whether the checksum is that of these bytes."""
        if self.sha256 is not None:
            return self.sha256 == hashlib.sha256(data).hexdigest()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        return self.blob_id == blob.hexdigest()


def _listed(entry: dict[str, Any]) -> RepositoryFile:
    """Return a file of a listing; raises TypeError or KeyError for what none can be."""
    large = entry.get("lfs")
    sha256 = None if large is None else large["oid"]
    file = RepositoryFile(entry["path"], entry["size"], entry["oid"], sha256, entry.get("xetHash"))
    if not (isinstance(file.path, str) and isinstance(sha256 or file.blob_id, str)):
        raise TypeError("path and checksum are texts")
    if type(file.size) is not int or file.size < 0:
        raise TypeError("sizes are counts")
    return file


@dataclass(frozen=True)
class HubClient:
    """One repository at one commit ("": not resolved yet); address names it in messages.

    locations are signed links to the storage of files, by path; they work for an hour.
    """

    repo: str
    address: Address
    commit: str = ""
    endpoint: str = field(default_factory=hub_endpoint)
    locations: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str | None) -> str:
        """Return the commit that a branch, tag or abbreviated commit is now."""
        commit = self.info(revision).get("sha")
        if commit is None:
            raise of.CONTRADICTION.at(self.address, "none", expected="a repository's commit")
        return str(commit)

    def info(self, revision: str | None = None) -> dict[str, Any]:
        """Return what the Hub says of the repository (InvalidInputError, IoError)."""
        at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
        answer = self.answer(f"{self.endpoint}/api/models/{self.repo}{at}")
        with self._read_as("an object of the repository's facts"):
            facts = dict(answer.json())
            if not isinstance(facts.get("sha"), str | None):
                raise TypeError("a commit is a text")
            return facts

    def tree(self) -> list[RepositoryFile]:
        """Return every file of the commit, with size and checksums."""
        files: list[RepositoryFile] = []
        url = f"{self.endpoint}/api/models/{self.repo}/tree/{self.commit}?recursive=true"
        while url:
            answer = self.answer(url)
            with self._read_as("a list of files with type, path, size and checksum"):
                entries = [entry for entry in answer.json() if entry["type"] == "file"]
                files += map(_listed, entries)
            following = urlsplit(answer.links.get("next", {}).get("url", ""))
            # Only ever this endpoint: the token goes along.
            page = f"{following.path}?{following.query}"
            url = urljoin(self.endpoint, page) if following.path else ""
        return files

    @contextmanager
    def _read_as(self, expected: str) -> Iterator[None]:
        """Refuse an answer that is not as the Hub's own are (IoError)."""
        try:
            yield
        except _UNREADABLE as error:
            found = f"another answer ({type(error).__name__})"
            raise of.CONTRADICTION.at(self.address, found, expected=expected) from None

    def answer(self, url: str) -> httpx2.Response:
        """Return the answer to a GET request (InvalidInputError, IoError)."""

        def ask() -> httpx2.Response:
            response = get_session().get(url, headers=self._headers(url), timeout=_timeout())
            hf_raise_for_status(response)
            return response

        return self.patiently(ask, self.address)

    def whole(self, file: RepositoryFile) -> bytes:
        """Return a small file whole, with its checksum compared."""
        url = self._url(file.path)
        where = self.address / file.path
        headers = self._headers(url) | {"Accept-Encoding": "gzip"}  # an index shrinks tenfold

        def attempt() -> bytes:
            data = bytearray()
            with get_session().stream("GET", url, headers=headers, timeout=_timeout()) as response:
                hf_raise_for_status(response)
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > file.size:
                        break
            return bytes(data)

        data = self.patiently(attempt, where)
        if not file.has(data):
            raise IoError(
                "A file does not arrive as the repository lists it",
                where=where,
                expected=f"{file.size} bytes with the listed checksum",
                found=f"{len(data)} bytes" if len(data) <= file.size else "more bytes",
                todo="Run the same command again; if it fails again, a proxy changes what passes",
            )
        return data

    def fetch(self, file: RepositoryFile, span: range, *, sink: Sink, pause: Pause) -> None:
        """Give sink the bytes of a span of a file in order, over as many requests as it takes."""
        transfer(partial(self._stream, file), span, sink=sink, pause=pause)

    def _stream(self, file: RepositoryFile, span: range) -> Iterator[bytes]:
        """Yield the bytes of a span as they come (AttemptFailed).

        Without a link to the storage the Hub is asked, which says what the file is and leads there.
        """
        where = self.address / file.path
        with _attempt(where):
            link = self.locations.get(file.path)
            url = link or self._url(file.path)
            headers = self._headers(url) | {"Range": f"bytes={span.start}-{span.stop - 1}"}
            left = len(span)
            with get_session().stream("GET", url, headers=headers, timeout=_timeout()) as response:
                if link is None:
                    if self._is_hub(str(response.url)):
                        hf_raise_for_status(response)
                    self._check_facts(file, [*response.history, response])
                    self.locations[file.path] = str(response.url)
                if response.status_code >= 400:
                    if response.status_code not in _TRANSIENT:
                        self.locations.pop(file.path, None)
                    raise _BadStatus(response)
                _check_range(response, span, size_bytes=file.size, where=where)
                # Read to its end, so that the connection serves the next request too.
                for chunk in response.iter_raw():
                    yield chunk[:left]
                    left -= len(chunk)
                    if left < 0:
                        return
            if left:
                raise _Cut("the body ended early")

    def _check_facts(self, file: RepositoryFile, answers: Sequence[httpx2.Response]) -> None:
        """Refuse a file that an answer says to be another than the Hub listed."""
        listed = {"commit": self.commit, "size": str(file.size), "checksum": file.sha256}
        for name, header in _FACTS.items():
            told = next((one.headers[header] for one in answers if header in one.headers), "")
            found, expected = told.removeprefix("W/").strip('"'), listed[name]
            if found and expected and found != expected:
                raise of.CONTRADICTION.at(
                    self.address / file.path,
                    f"{name} {found}",
                    expected=f"{name} {expected}, as it listed",
                )

    def _url(self, path: str) -> str:
        return f"{self.endpoint}/{self.repo}/resolve/{quote(self.commit, safe='')}/{quote(path)}"

    def _headers(self, url: str) -> dict[str, str]:
        """Return the headers of a request; the token goes to the Hub alone, and a redirection to
        another host leaves it out."""
        own = self._own_headers
        if not self._is_hub(url):
            own = {"user-agent": own["user-agent"]}
        return own | {"Accept-Encoding": "identity"}

    def _is_hub(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]

    @cached_property
    def _own_headers(self) -> dict[str, str]:
        headers = build_hf_headers(library_name="mtp-export", library_version=__version__)
        return dict(headers)

    def patiently(self, request: Callable[[], T], where: Address) -> T:
        """Return what a request returns, made again while waiting helps.

        Raises what failure returns, from the last error.
        """

        def attempt() -> T:
            with _attempt(where):
                try:
                    return request()
                except _UNREADABLE as error:
                    raise of.CONTRADICTION.at(
                        where,
                        f"another answer ({type(error).__name__})",
                        expected="an answer that huggingface_hub can read",
                    ) from error

        return patiently(attempt)


def _timeout() -> float:
    """Return the seconds without a byte after which an attempt has failed."""
    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _check_range(
    response: httpx2.Response, span: range, *, size_bytes: int, where: Address
) -> None:
    """Refuse an answer that is not exactly the span: its bytes would be taken for others."""
    expected = f"bytes {span.start}-{span.stop - 1}/{size_bytes}"
    status, headers = response.status_code, response.headers
    coding = headers.get("content-encoding", "identity")
    if (status, headers.get("content-range"), coding) != (206, expected, "identity"):
        found = f"{status}, {headers.get('content-range', 'no Content-Range')}, {coding}"
        raise of.OTHER_BYTES.at(where, found, expected=f"206, {expected}, identity")
