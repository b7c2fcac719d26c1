"""Reads prompts from a JSON-lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtp_export.errors import InvalidInputError, IoError

Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read the prompts of a file, text or token ids on each line (IoError, InvalidInputError)."""
    return tuple(prompt for prompt, _ in read_texts(path))


def read_texts(path: Path) -> tuple[tuple[Prompt, Prompt | None], ...]:
    """Read prompts, each with a model's answer where its line has a completion.

    Raises IoError and InvalidInputError.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise IoError("The prompts cannot be read", where=path, found=error) from error
    return tuple(_text_of(path, number, line) for number, line in enumerate(lines, 1) if line)


def _text_of(path: Path, number: int, line: str) -> tuple[Prompt, Prompt | None]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        prompt, completion = _part(value, "prompt"), _part(value, "completion")
        given = {"completion", "completion_token_ids"} & value.keys()
        if prompt is not None and (completion is not None or not given):
            return prompt, completion
    raise InvalidInputError(
        f"Line {number} is no prompt",
        where=path,
        expected='{"prompt": "..."} or {"prompt_token_ids": [...]}, and "completion" or '
        '"completion_token_ids" where a model has answered',
        found=line[:80],
    )


def _part(value: dict[str, Any], name: str) -> Prompt | None:
    """Return a text, or token ids, or None where the value is neither."""
    text, ids = value.get(name), value.get(f"{name}_token_ids")
    if isinstance(text, str):
        return text
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return tuple(ids)
    return None
