"""Reads prompts from a JSON-lines file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import InvalidInputError, IoError

Prompt = str | tuple[int, ...]

_LINE = (
    '{"prompt": "..."} or {"prompt_token_ids": [...]}, and "completion" or '
    '"completion_token_ids" where a model has answered'
)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read the prompts of a file, text or token ids on each line (IoError, InvalidInputError)."""
    return tuple(prompt for prompt, _ in read_texts(path))


def read_texts(path: Path) -> tuple[tuple[Prompt, Prompt | None], ...]:
    """Read prompts, each with a model's answer where its line has a completion.

    Blank lines and a byte order mark are skipped. Raises IoError and InvalidInputError.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise IoError("The prompts cannot be read", where=path, found=error) from error
    texts = tuple(
        _text_of(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not texts:
        raise InvalidInputError(
            "The file holds no prompt", where=path, expected=f"lines of {_LINE}"
        )
    return texts


def require_unicode(text: str, name: str) -> None:
    """Refuse a text with lone surrogates: no encoding has them (InvalidInputError).

    Python gives them for bytes on a command line that are no UTF-8, and JSON may spell them out.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{name} is not Unicode text",
            expected="text in UTF-8",
            found=text[max(0, error.start - 20) : error.end + 20],
        ) from None


def are_ids(prompt: object) -> bool:
    """Return True for a sequence of whole numbers that is no bytes."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray | memoryview):
        return False
    return all(type(token) is int for token in prompt)


def _text_of(path: Path, number: int, line: bytes) -> tuple[Prompt, Prompt | None]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"Line {number} is not UTF-8",
            where=path,
            found=error,
            todo="Save the file as UTF-8 text",
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        place = f"line {number} of {path}"
        prompt, completion = _part(value, "prompt", place), _part(value, "completion", place)
        given = {"completion", "completion_token_ids"} & value.keys()
        if prompt not in (None, ()) and (completion is not None or not given):
            return prompt, completion
    raise InvalidInputError(
        f"Line {number} is no prompt", where=path, expected=_LINE, found=text[:80]
    )


def _part(value: dict[str, Any], part: str, place: str) -> Prompt | None:
    """Return a text, or token ids, or None where the value is neither."""
    text, ids = value.get(part), value.get(f"{part}_token_ids")
    if isinstance(text, str):
        require_unicode(text, f"The {part} in {place}")
        return text
    if isinstance(ids, list) and are_ids(ids):
        return tuple(ids)
    return None
