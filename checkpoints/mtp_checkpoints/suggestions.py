"""Suggestions for names that do not exist: the known name that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like another, or that has it as one of its words; None
    where none is alike."""
    wanted = _plain(name)
    plain = {_plain(each): each for each in known}
    if not wanted:
        return None
    if close := get_close_matches(wanted, plain, n=1, cutoff=0.65):
        return plain[close[0]]
    having = (each for each in plain.values() if wanted in map(_plain, re.split("[-_./]", each)))
    return next(having, None)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the question that names what was probably meant, None where nothing is alike."""
    found = nearest(name, known)
    return None if found is None else f"Did you mean {found}?"


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())
