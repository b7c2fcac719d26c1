"""Edits the body of an HTTP request: a field, anything in it, or its text."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text
from fuzz.mutators.values import dump, edit_value, load, nasty
from mtp_export.serve.protocol import ChatBody, CompletionBody

_FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "best_of", "tools"})


def mutate(path: Path, random: Random) -> None:
    """Change one to three fields, or the text."""
    body = load(path)
    if not isinstance(body, dict) or random.random() < 0.2:
        path.write_bytes(edit_text(path.read_bytes(), random))
        return
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.5:
            field = random.choice(_FIELDS)
            body[field] = nasty(random, body.get(field))
        else:
            edit_value(body, random)
    dump(path, body)
