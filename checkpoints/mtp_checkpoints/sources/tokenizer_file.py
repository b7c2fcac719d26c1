"""The file that a checkpoint's tokenizer is in, and what the package raises that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Place

TOKENIZER_NAME = "tokenizer.json"


@contextmanager
def tokenizer_failures(path: Place, what: str) -> Iterator[None]:
    """Raise InvalidInputError for what the tokenizers package raises: exceptions of any kind, and
    panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInputError(
            what,
            where=path,
            found=str(error)[:500],
            todo="Get the file again from the checkpoint's source, or update tokenizers",
        ) from error
