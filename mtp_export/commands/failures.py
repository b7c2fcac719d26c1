"""Errors as the program reports them: one paragraph and an exit code."""

from __future__ import annotations

import json
import os
import sys
from textwrap import TextWrapper
from typing import NamedTuple

from mtp_checkpoints.errors import (
    EXPORT_GOES_ON,
    IT_GOES_ON,
    Interrupted,
    IoError,
    MtpExportError,
    ResourceError,
)
from mtp_export.paragraphs import command_lines


class Failure(NamedTuple):
    """A message for stderr, the exit code of the program, the end of the message that says what to
    do, and the command at the end of that."""

    message: str
    exit_code: int
    hint: str = ""
    command: str = ""


def is_interrupt(error: BaseException) -> bool:
    """Return True for Ctrl-C, and for what Python makes of it where a compiled function was taking
    its arguments."""
    if isinstance(error, SystemError):
        return isinstance(error.__cause__, KeyboardInterrupt)
    return isinstance(error, KeyboardInterrupt)


def failure_of(error: BaseException, after_interrupt: str | None = None) -> Failure:
    """Return the failure that an error is reported as; errors of the program itself have code 1.

    after_interrupt: words that follow those of Ctrl-C.
    """
    if is_interrupt(error):
        error = Interrupted()
    if isinstance(error, Interrupted):
        return Failure(" ".join(filter(None, [str(error), after_interrupt])), error.exit_code)
    if isinstance(error, MtpExportError):
        return Failure(str(error), error.exit_code, error.hint, error.command)
    if isinstance(error, MemoryError):
        return failure_of(ResourceError("Out of memory", todo="Lower --max-memory or --workers"))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        found = str(error).partition(". ")[0]
        todo = "Use a device with more memory, or a bundle in a narrower precision"
        return failure_of(ResourceError("Out of memory on the device", found=found, todo=todo))
    if isinstance(error, OSError):
        file = "" if error.filename is None else f" ({error.filename})"
        found = error.strerror or repr(error)
        return failure_of(IoError(f"Reading or writing failed{file}", found=found))
    return Failure(
        f"Internal error: {error!r}. Please report it, with the"
        " output of --debug and of mtp-export env.",
        1,
    )


def without_promise(failure: Failure) -> Failure:
    """Return the failure of a command that keeps nothing: that it goes on is not said of it."""
    message, hint = failure.message, failure.hint
    for promise in (EXPORT_GOES_ON, IT_GOES_ON):
        message, hint = message.replace(promise, ""), hint.replace(promise, "")
    return failure._replace(message=message, hint=hint)


def failure_json(failure: Failure) -> str:
    """Return a failure as JSON, in the place of a result."""
    facts = {"message": failure.message, "hint": failure.hint, "exit_code": failure.exit_code}
    return json.dumps({"error": facts}, indent=2) + "\n"


def print_failure(failure: Failure, said: str) -> None:
    """Print a failure on stderr: as one paragraph, on a terminal with what to do, and a command for
    it, on lines of their own, and in colours unless NO_COLOR is set. said: the word before the
    message, or nothing."""
    message, hint = failure.message, failure.hint
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if not is_terminal:
        print(f"mtp-export: {said}{message}", file=sys.stderr)
        return
    if failure.exit_code == Interrupted.exit_code:
        print(file=sys.stderr)  # below the ^C that the terminal shows
    is_split = bool(hint) and message.endswith(f" {hint}")
    if is_split:
        message = message.removesuffix(f" {hint}")
    red, dim, end = (
        ("", "", "") if os.environ.get("NO_COLOR") else ("\x1b[31m", "\x1b[2m", "\x1b[0m")
    )
    columns = _columns()
    first, *others = _wrapped(f"mtp-export: {said}{message}", columns)
    word = said.strip()
    print(first.replace(word, f"{red}{word}{end}", 1) if word else first, file=sys.stderr)
    for line in others:
        print(line, file=sys.stderr)
    if is_split:
        command = failure.command if hint.endswith(f": {failure.command}") else ""
        hint = "\n".join(_wrapped(f"hint: {hint.removesuffix(command).rstrip()}", columns))
        print(f"{dim}{hint}{end}", file=sys.stderr)
        if command:
            print("\n".join(_wrapped(f"  {command}", columns)), file=sys.stderr)


def _columns() -> int:
    """Return the width of the terminal on stderr, 0 where none is known."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # as of what only looks like a terminal
        return 0


def _wrapped(text: str, columns: int) -> list[str]:
    """Return the lines of a message, broken between words where they are wider than a terminal,
    and indented below the first line of an entry of a list; those of commands are indented, and
    broken as a shell takes them."""
    if not columns:
        return text.splitlines()
    wrapper = TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    lines: list[str] = []
    for line in text.splitlines():
        wrapper.subsequent_indent = "  " if line.startswith("- ") else ""
        is_command = line.startswith(" ")
        lines += command_lines(line, columns) if is_command else wrapper.wrap(line)
    return lines
