"""Edits a model card: the front matter that names the model it was made from, and its text."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text

_NAMES: tuple[bytes, ...] = (
    *(b"", b" ", b"acme/model", b"- acme/model", b"\n- acme/model", b"\n-\n-", b"[acme/model]"),
    *(b"'acme/x; rm -rf .'", b'"acme/$(x)"', b"../x", b"/x/y", b"acme/model/more", b"hf://acme/x"),
    *(
        b"acme/..",
        b"acme/" + b"x" * 100_000,
        b"\xff/\xfe",
        b"\xc3\xa9/\xc3\xa9",
        b"a\0b/c",
        b"null",
    ),
    *(b" " * 100_000, b"\n" * 100_000, b"\r\n" * 50_000, b"\n -" * 30_000, b"\t\n" * 50_000),
)


def mutate(path: Path, random: Random) -> None:
    """Name another model, many of them, or change the text."""
    raw = path.read_bytes()
    match random.randrange(4):
        case 0:
            raw = b"---\nbase_model:" + random.choice(_NAMES) + b"\n---\n"
        case 1:
            raw = (b"base_model:" + random.choice(_NAMES) + b"\n") * random.choice((2, 20))
        case 2:
            raw = b"base_model:" + b" \n" * random.randrange(50_000) + random.choice(_NAMES)
        case _:
            raw = edit_text(raw, random)
    path.write_bytes(raw)
