"""Replaces a file by what is no regular file, or by a link; or puts a link beside it."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

SECRET = Path(__file__).with_name("secret.txt")
_DEVICES = ("/dev/zero", "/dev/null", "/dev/full", "/dev/urandom")
_HUGE_BYTES = (300_000_000, 3_000_000_000)  # of a hole: no disk is used
_STRANGERS = ("tokenizer.model", "x.py", "LICENSE", "chat_template.jinja", "vocab.json")


def mutate(path: Path, random: Random) -> None:
    """Replace the file, or add a link to a file outside the folder.

    A user names the file of prompts, and it may well be a pipe: it is left alone. So are a
    server's answers, which are the fuzzer's own.
    """
    if path.suffix == ".jsonl" or path.name == "answers.json":
        return
    kind = random.randrange(11)
    if kind < 2:
        path = path.with_name(random.choice(_STRANGERS))
    path.unlink(missing_ok=True)
    match kind:
        case 0 | 1 | 2 | 3:
            path.symlink_to(SECRET)
        case 4:
            os.mkfifo(path)
        case 5:
            path.mkdir()
        case 6:
            path.symlink_to(random.choice(_DEVICES))
        case 7:
            path.symlink_to(random.choice((path.name, "nowhere", ".", "..")))
        case 8:
            siblings = sorted(other.name for other in path.parent.iterdir() if other.is_file())
            path.symlink_to(random.choice(siblings or ["nowhere"]))
        case 9:
            with path.open("wb") as file:
                file.truncate(random.choice((0, *_HUGE_BYTES)))
