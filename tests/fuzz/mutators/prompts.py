"""Edits a file of prompts: its encoding, its lines, and what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text
from fuzz.mutators.values import nasty

_LINES: tuple[bytes, ...] = (
    *(b"", b"\r", b" ", b"null", b"[]", b"{}", b'"text"', b"1", b"\0", b"\xff\xfe", b"{'a': 1}"),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": ""}', b'{"prompt": "\\u0000"}', b"[" * 100_000),
    *(b'{"prompt": 1}', b'{"prompt": null, "prompt_token_ids": [1]}', b'{"prompt_token_ids": []}'),
    *(b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "' + b"a" * 3000 + b'"}', b"NaN"),
    *(b'{"prompt": "a", "completion": 3}', b'{"a":' * 100_000, b'{"prompt": "' + b"\xff" + b'"}'),
)


def mutate(path: Path, random: Random) -> None:
    """Change the encoding, or a line."""
    raw = path.read_bytes()
    lines = raw.split(b"\n")
    at = random.randrange(len(lines))
    match random.randrange(9):
        case 0:
            raw = random.choice((b"", b"\n\n", b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n")))
        case 1:
            codec = random.choice(("utf-16", "utf-32", "utf-16-le"))
            raw = raw.decode("utf-8", "replace").encode(codec)
        case 2 | 3:
            lines.insert(at, random.choice(_LINES))
            raw = b"\n".join(lines)
        case 4 | 5:
            ids = [nasty(random, 5) for _ in range(random.randrange(4))]
            lines[at] = json.dumps({"prompt_token_ids": [5, *ids]}).encode()
            raw = b"\n".join(lines)
        case 6:
            key = random.choice(("prompt", "prompt_token_ids", "completion", ""))
            lines[at] = json.dumps({key: nasty(random, "a")}).encode()
            raw = b"\n".join(lines)
        case _:
            raw = edit_text(raw, random)
    path.write_bytes(raw)
