"""Errors that are reported to the user: one class per exit code, one paragraph per message."""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE = 2_000  # characters
_LEFT_OUT = " […] "
# Ends of what to do that are true of commands which keep what they have done.
EXPORT_GOES_ON = ": an export goes on where it stopped"
IT_GOES_ON = ": it goes on where it stopped"


class _NotGiven:
    def __str__(self) -> str:
        return ""


_NOT_GIVEN = _NotGiven()


class MtpExportError(Exception):
    """Error with an exit code and a paragraph: what, where, expected, found, and what to do, at the
    end of which may be a command for a shell."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = _NOT_GIVEN,
        expected: object = _NOT_GIVEN,
        found: object = _NOT_GIVEN,
        todo: str | None = None,
        command: str = "",
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.todo = todo
        self.command = command
        super().__init__(self.paragraph())

    @property
    def hint(self) -> str:
        """The end of the paragraph that says what to do; nothing where nobody knows."""
        return "" if self.todo is None else _printable(self._advice)

    @property
    def _advice(self) -> str:
        return f"{self.todo}: {self.command}" if self.command else _sentence(self.todo or "")

    def paragraph(self) -> str:
        """Return the message as one paragraph; parts that were not given are left out."""
        parts = [self.what]
        if self.where is not _NOT_GIVEN:
            parts[0] = f"{self.what.rstrip('.')} ({self.where})"
        if self.expected is not _NOT_GIVEN:
            parts.append(f"Expected {self.expected}")
        if self.found is not _NOT_GIVEN:
            parts.append(f"Found {self.found}")
        sentences = [_sentence(part) for part in parts]
        if self.todo is not None:
            sentences.append(self._advice)
        return _clipped(_printable(_clipped(" ".join(sentences))))


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text.rstrip(".") + "."


def _printable(text: str) -> str:
    """Return text with control characters, as of damaged files, escaped: a message is one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _clipped(text: str) -> str:
    """Return text without its middle where it is too long to be read, as of damaged files.

    The beginning says what and where, the end what to do.
    """
    if len(text) <= MAX_MESSAGE:
        return text
    kept = (MAX_MESSAGE - len(_LEFT_OUT)) // 2
    return text[:kept] + _LEFT_OUT + text[-kept:]


class UsageError(MtpExportError):
    """Options that contradict each other or are invalid."""

    exit_code = 2


class InvalidInputError(MtpExportError):
    """A checkpoint, config or bundle that is damaged or incomplete."""

    exit_code = 3


class UnsupportedError(MtpExportError):
    """A model, hardware or option pair that this tool does not support."""

    exit_code = 4


class ResourceError(MtpExportError):
    """Too little disk or memory, found before the first byte is written."""

    exit_code = 5


class IoError(MtpExportError):
    """A read or write that failed, or the network."""

    exit_code = 6


class VerificationError(MtpExportError):
    """A bundle that does not pass its verification."""

    exit_code = 7

    def add_lines(self, lines: Sequence[str]) -> None:
        """Add lines below the paragraph, of which indented ones are commands."""
        self.args = ("\n".join([*self.args, *map(_printable, lines)]),)


class OutputExistsError(MtpExportError):
    """An output folder that already holds something that this run must not touch."""

    exit_code = 8


class Interrupted(MtpExportError):
    """Ctrl-C: the exit code is 128 plus the number of SIGINT. done: share of the work, 0 to 1."""

    exit_code = 130

    def __init__(self, done: float | None = None) -> None:
        at = "" if done is None else f" at {int(100 * done)} %"
        super().__init__(f"Interrupted{at}")
