"""Prompts out of a JSON-lines file."""

from __future__ import annotations

import json
from pathlib import Path

from mtp_export.errors import InvalidInputError, IoError

Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, a text or token ids a line (IoError, InvalidInputError)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise IoError("The prompts cannot be read", where=path, found=error) from error
    return tuple(_prompt_of(path, number, line) for number, line in enumerate(lines, 1) if line)


def _prompt_of(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        text, ids = value.get("prompt"), value.get("prompt_token_ids")
        if isinstance(text, str):
            return text
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            return tuple(ids)
    raise InvalidInputError(
        f"Line {number} is no prompt",
        where=path,
        expected='{"prompt": "..."} or {"prompt_token_ids": [...]}',
        found=line[:80],
    )
