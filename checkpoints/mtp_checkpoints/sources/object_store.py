"""A folder of an object store (Amazon S3, Google Cloud Storage, Azure) as a byte source.

Its objects are listed once and read by byte ranges through obstore, on the condition that they
still have the ETag that was listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints import __version__
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources import remote_failures as of
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.remote_source import OpenRemoteFile, RemoteSource, fetched
from mtp_checkpoints.sources.transfers import (
    AttemptFailed,
    Pause,
    Sink,
    patiently,
    transfer,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

READ_SECONDS = 10  # without a byte, after which an attempt has failed
MAX_OBJECTS = 100_000  # many times the files of any checkpoint
_CHUNK_BYTES = 1  # at least: bytes as they come, and none of them lost with a broken transfer
_LISTED_AT_ONCE = 1_000
_PLACE = re.compile(r"(s3|gs|az)://[^/@?#\s]+(/[^@?#]*)?")
# Words of obstore's errors, which have no types of their own.
_STATUS = re.compile(r"status code: (\d{3})")
_OTHER_BYTES = ("NotPartial", "UnexpectedRange", "ContentRange", "InvalidRangeRequest")
_NO_CREDENTIALS = ("169.254.", "TokenRequest")  # it asked the machine for them in vain
_TRANSIENT = {"408", "429", "500", "502", "503", "504"}
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# Variables that obstore reads, by the kind of store.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_REGION;"
    " AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud auth application-default login;"
    " GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN;"
    " AZURE_SKIP_SIGNATURE=true for a public container",
}


def open_object_store(address: Address) -> RemoteSource:
    """Open a folder of a bucket: s3://bucket/folder, gs://bucket/folder or az://container/folder.

    Raises UnsupportedError without obstore, InvalidInputError for a malformed address and for a
    bucket or folder that is missing or that the credentials give no access to, IoError when the
    store cannot be reached.
    """
    text = address.text.rstrip("/")
    if not _PLACE.fullmatch(text):
        # What it has after "?" or before "@" may be a secret.
        raise of.STORE_ADDRESS.at(
            f"{address.text.partition('://')[0]}://…",
            "another address, not repeated here: what it has beside that may be a secret",
            credentials=_credentials(address),
        )
    path = Address(text)
    store = _store(path)
    objects = patiently(partial(_listed, store, path))
    files = {name: _file(path, store, meta) for name, meta in objects.items()}
    if not files:
        raise InvalidInputError(
            "There are no objects here",
            where=path,
            expected="config.json and safetensors shards",
            found="no object",
            todo="Check the bucket and the folder: s3://bucket/folder is the one that holds"
            " config.json and the safetensors shards",
        )
    return RemoteSource(path, {"url": text}, files)


@dataclass(frozen=True)
class ObjectFile:
    """An object of a bucket. version is its ETag, without quotation marks."""

    path: Address
    name: str = field(compare=False)
    size_bytes: int = field(compare=False)
    version: str = field(compare=False)
    store: ObjectStore = field(compare=False, repr=False)

    sha256 = None

    def open(self, once: range | None = None) -> OpenRemoteFile:
        return OpenRemoteFile(self)

    def fetch(self, span: range, sink: Sink, pause: Pause) -> None:
        """Give sink the bytes of a span in order (IoError)."""
        transfer(self._stream, span, sink=sink, pause=pause)

    def whole(self) -> bytes:
        """Return the whole object (IoError)."""
        return fetched(self, range(self.size_bytes))

    def _stream(self, span: range) -> Iterator[bytes]:
        """Yield the bytes of a span as they come (AttemptFailed)."""
        import obstore

        asked = (self.size_bytes, (span.start, span.stop))
        left = len(span)
        with _attempt(self.path):
            answer = obstore.get(
                self.store,
                self.name,
                options={"range": (span.start, span.stop), "if_match": f'"{self.version}"'},
            )
            if _etag(answer.meta) != self.version:  # a store that takes no conditions
                raise of.OBJECT_CHANGED.at(self.path, "an object with another one")
            answered = (answer.meta["size"], answer.range)
            if answered != asked:
                expected = f"size and range {asked}"
                raise of.STORE_IS_UNUSABLE.at(self.path, str(answered), expected=expected)
            for chunk in answer.stream(_CHUNK_BYTES):
                yield chunk
                left -= len(chunk)
        if left:
            found = "the body ended early"
            refusal = of.STORE_BROKE_OFF.at(self.path, found)
            raise AttemptFailed(refusal, server=_bucket(self.path), cause=found)


def _store(path: Address) -> ObjectStore:
    """Return the store of an address, with the credentials that the environment has for it."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise UnsupportedError(
            "Object stores need a package that is not installed",
            where=path,
            todo="Install it with pip install 'mtp-export[cloud]', or download the checkpoint and"
            " point at its folder",
        ) from None
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": os.environ.get(f"{_VARIABLES[path.text[:2]]}_ALLOW_HTTP") == "true",
            "user_agent": f"mtp-export/{__version__}",
            "connect_timeout": timedelta(seconds=READ_SECONDS),
            "read_timeout": timedelta(seconds=READ_SECONDS),
            "timeout": timedelta(days=1),  # of a whole transfer, however slow
        },
        "retry_config": {"max_retries": 0},  # transfer() goes on where one stopped
    }
    if path.text.startswith("s3:") and _has_profile():
        options["credential_provider"] = _profile(path)
    try:
        return from_url(path.text, **options)
    except Exception as error:  # obstore's ValueErrors, of addresses and of variables
        credentials = _credentials(path)
        raise of.STORE_SETTINGS.at(path, type(error).__name__, credentials=credentials) from None


def _has_profile() -> bool:
    """Return True where credentials of Amazon are in files, which boto3 reads, not obstore."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return False
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return "AWS_PROFILE" in os.environ or Path(file).expanduser().is_file()


def _profile(path: Address) -> object:
    """Return what asks boto3 for the credentials of a profile."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except ImportError:
        raise UnsupportedError(
            "Profiles of Amazon's credentials need a package that is not installed",
            where=path,
            todo="Install it with pip install boto3, or set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY",
        ) from None
    except Exception as error:  # botocore's, of a missing or malformed profile
        raise InvalidInputError(
            "Amazon's credentials cannot be read from the profile",
            where=path,
            expected="a profile that boto3 reads",
            found=type(error).__name__,
            todo="Check AWS_PROFILE and ~/.aws/credentials, or unset it",
        ) from None


def _listed(store: ObjectStore, path: Address) -> dict[str, Any]:
    """Return what the store says of every object below an address, by name (AttemptFailed)."""
    import obstore

    objects: dict[str, Any] = {}
    with _attempt(path):
        for page in obstore.list(store, chunk_size=_LISTED_AT_ONCE):
            objects |= {meta["path"]: meta for meta in page if meta["path"]}
            if len(objects) > MAX_OBJECTS:
                raise InvalidInputError(
                    "There are too many objects for a checkpoint",
                    where=path,
                    expected=f"at most {MAX_OBJECTS:,}",
                    found="more",
                    todo="Point at the folder that holds config.json and the safetensors shards",
                )
    return objects


def _file(path: Address, store: ObjectStore, meta: Any) -> ObjectFile:
    name, version = meta["path"], _etag(meta)
    if not version:
        expected = "an ETag, by which a change of the object is noticed"
        raise of.STORE_IS_UNUSABLE.at(path / name, "none", expected=expected)
    return ObjectFile(path / name, name=name, size_bytes=meta["size"], version=version, store=store)


def _etag(meta: Any) -> str:
    """Return an object's ETag; listings of Azure leave its quotation marks out."""
    return (meta["e_tag"] or "").removeprefix("W/").strip('"')


@contextmanager
def _attempt(path: Address) -> Iterator[None]:
    """Make one attempt of the requests in the block (AttemptFailed)."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        raise _failed(path, error) from None


def _failed(path: Address, error: Exception) -> AttemptFailed:
    """Return the failure of an attempt.

    Nothing is repeated of what a store wrote, nor the address of a request: they may hold secrets.
    """
    from obstore.exceptions import PreconditionError

    said = str(error)
    answer = _STATUS.search(said)
    status = answer[1] if answer else ""
    found = f"HTTP {status}" if status else "no whole answer"
    credentials, is_final = _credentials(path), True
    if isinstance(error, PreconditionError):
        refusal = of.OBJECT_CHANGED.at(path, "an object with another one")
    elif any(words in said for words in _NO_CREDENTIALS):
        found, is_final = "no credentials", False
        refusal = of.STORE_IS_CLOSED.at(path, found, credentials=credentials)
    elif any(words in said for words in _OTHER_BYTES):
        expected = "the bytes that it was asked for"
        refusal = of.STORE_IS_UNUSABLE.at(path, "others", expected=expected)
    elif status in ("401", "403"):
        refusal = of.STORE_IS_CLOSED.at(path, found, credentials=credentials)
    elif status == "404":
        refusal = of.STORE_HAS_NOTHING.at(path, found)
    else:
        is_final = status not in ("", *_TRANSIENT)
        refusal = of.STORE_BROKE_OFF.at(path, found)
    return AttemptFailed(refusal, server=_bucket(path), cause=found, is_final=is_final)


def _bucket(path: Address) -> str:
    """Return the bucket or container of an address, which names its store."""
    scheme, _, rest = path.text.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _credentials(path: Address) -> str:
    """Return the words for the variables that obstore reads for an address."""
    return _CREDENTIALS[path.text.partition("://")[0]]
