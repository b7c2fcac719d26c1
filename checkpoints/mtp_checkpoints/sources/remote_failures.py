"""Failures of the Hub and of object stores, as errors for people.

None repeats what a server wrote, nor an address that is signed: they may hold secrets.
"""

from __future__ import annotations

from typing import NamedTuple

from mtp_checkpoints.errors import EXPORT_GOES_ON, InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources.transfers import NAME_RETRIES, RETRIES

AGAIN = f"Run the same command again{EXPORT_GOES_ON}"
LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_ATTEMPTS = f"an answer within {RETRIES + 1} attempts"


class Failure(NamedTuple):
    """Kind of failure: its class of errors, its meaning, what was expected, and what to do."""

    error: type[MtpExportError]
    what: str
    expected: str
    todo: str

    def at(self, where: object, found: object, **words: str) -> MtpExportError:
        """Return the error of a failure at a place; words stand for {names} in what to do, expected
        in place of the kind's own."""
        expected = words.pop("expected", self.expected)
        todo = self.todo.format(**words)
        return self.error(self.what, where=where, expected=expected, found=found, todo=todo)


GATED = Failure(
    InvalidInputError,
    "The repository is gated",
    "a token whose account has accepted its conditions",
    f"Accept them on its page on the Hub, then {LOG_IN}",
)
NO_REPOSITORY = Failure(
    InvalidInputError,
    "There is no such repository, or it is private",
    "a public one, or a token that may read it",
    f"Check its name; for a private one {LOG_IN}",
)
NO_REVISION = Failure(
    InvalidInputError,
    "The repository has no such revision",
    "one of its branches, tags or commits after @",
    "See which it has on its page on the Hub, under Files and versions",
)
NO_FILE = Failure(
    InvalidInputError,
    "The repository lacks a file that it lists",
    "every listed file",
    "Name another revision with @; if that fails too, tell the repository's owner",
)
NO_ACCESS = Failure(
    InvalidInputError,
    "The Hub refuses access",
    "a repository that is public, or that the token may read",
    f"Check the name and the token: {LOG_IN}",
)
OFFLINE = Failure(
    IoError,
    "The Hub may not be asked: offline mode is switched on",
    "HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE unset, or a folder",
    "Unset them, or point at a folder on this machine",
)
UNREACHABLE = Failure(
    IoError,
    "The Hub cannot be reached",
    _ATTEMPTS,
    f"Check the network, the proxy and HF_ENDPOINT. {AGAIN}",
)
UNKNOWN_NAME = Failure(
    IoError,
    "The Hub's name cannot be looked up",
    f"an address for it within {NAME_RETRIES + 1} attempts",
    f"Check the network, the DNS and HF_ENDPOINT. {AGAIN}",
)
BROKEN_OFF = Failure(
    IoError,
    "The connection to the Hub broke off several times",
    _ATTEMPTS,
    f"Check the network. {AGAIN}",
)
ERROR_STATUS = Failure(
    IoError, "The Hub answers with an error", _ATTEMPTS, f"Wait a while. {AGAIN}"
)
# Not even by a new link.
STORAGE_GIVES_NOTHING = Failure(
    IoError, "The Hub's storage serves no bytes of a file", _ATTEMPTS, f"Wait a while. {AGAIN}"
)
STORAGE_TAKES_NOTHING = Failure(
    IoError, "The Hub's storage takes no bytes of a file", _ATTEMPTS, f"Wait a while. {AGAIN}"
)
# An answer that contradicts what the Hub said, or its own routes.
CONTRADICTION = Failure(
    IoError,
    "The Hub does not answer as it should",
    "",
    "Run the same command again; if it fails again, check HF_ENDPOINT and the proxy",
)
OTHER_BYTES = Failure(
    IoError,
    "A server does not send the bytes that it was asked for",
    "",
    "A mirror or proxy without byte ranges may be on the way: check HF_ENDPOINT, or download the"
    " checkpoint and point at its folder",
)
NOT_WRITABLE = Failure(
    InvalidInputError,
    "The token may not write to this repository",
    "a token with write access to it, or to its organisation",
    f"Check the name, and use another token: {LOG_IN}",
)
ACCOUNT_IS_FULL = Failure(
    IoError,
    "The Hub has no room for this: the account's storage is used up",
    "storage for all files of the bundle",
    "Delete what is not needed, or raise the limit in the account's settings on the Hub. Then run"
    " the same command again: what was uploaded stays there",
)
# A commit on a branch that somebody else changed.
REPOSITORY_MOVED = Failure(
    IoError,
    "Somebody else changed the repository meanwhile",
    "the commit that was looked at",
    "Nothing was committed. Run the same command again: what was uploaded stays there",
)

STORE_ADDRESS = Failure(
    InvalidInputError,
    "This is no address of a folder in a bucket",
    "s3://bucket/folder, gs://bucket/folder or az://container/folder, no more",
    "Give credentials by the environment: {credentials}",
)
STORE_SETTINGS = Failure(
    InvalidInputError,
    "The environment's settings for the store cannot be used",
    "settings that obstore takes",
    "Check {credentials}",
)
STORE_HAS_NOTHING = Failure(
    InvalidInputError,
    "There is no such bucket, folder or object",
    "one that the credentials may list and read",
    "Check the address, and the endpoint and region that the environment sets",
)
STORE_IS_CLOSED = Failure(
    InvalidInputError,
    "The store gives no access",
    "credentials that may list and read it",
    "Check the name, and the credentials: {credentials}",
)
OBJECT_CHANGED = Failure(
    InvalidInputError,
    "The source changed while it was exported",
    "the object that was listed at the beginning, by its ETag",
    "Wait until nothing writes it any more, then run the same command again",
)
STORE_IS_UNUSABLE = Failure(
    IoError,
    "A store does not answer as an object store must",
    "",
    "Check the endpoint that the environment sets, and the proxy; or download the checkpoint and"
    " point at its folder",
)
STORE_BROKE_OFF = Failure(
    IoError,
    "The object store does not answer",
    _ATTEMPTS,
    f"Check the network, and the endpoint and region that the environment sets. {AGAIN}",
)
