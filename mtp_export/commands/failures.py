"""Errors as the program reports them: one paragraph and an exit code."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from mtp_export.errors import IoError, MtpExportError, ResourceError

INTERRUPTED = 130  # exit code: 128 plus the number of SIGINT


@dataclass(frozen=True)
class Failure:
    """A message for stderr, and the exit code of the program."""

    message: str
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an error is reported as; errors of the program itself have code 1."""
    if isinstance(error, MtpExportError):
        return Failure(str(error), error.exit_code)
    if isinstance(error, typer.TyperException):
        return Failure(error.format_message(), 2)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        message = "Interrupted. Run the same command again: it goes on where it stopped."
        return Failure(message, INTERRUPTED)
    if isinstance(error, MemoryError):
        return failure_of(ResourceError("Out of memory", todo="Lower --max-memory or --workers"))
    if isinstance(error, OSError):
        what = "Reading or writing failed"
        return failure_of(IoError(what, where=error.filename, found=error.strerror))
    return Failure(f"Internal error: {error!r}. Please report it, with the output of --debug.", 1)
