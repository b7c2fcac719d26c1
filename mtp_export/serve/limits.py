"""Bounds of what clients may send and ask for, so that none takes the others' time or memory.

docs/serve.md states them. What is bounded before it is parsed is so because the parser keeps the
interpreter's lock until it is done.
"""

from __future__ import annotations

import resource

from mtp_export.serve.errors import ApiError

MAX_CONNECTIONS = 2048
MAX_REFUSED = 256  # connections that are refused and not closed yet, beside those
REFUSED_SECONDS = 2.0  # in which a client may read that it is refused
HEAD_SECONDS = 30.0  # in which a connection must send the head of a request
MAX_BODY_BYTES = 8 << 20
SMALL_BODY_BYTES = 64 << 10  # up to which a body costs too little to be counted
MAX_BODIES_BYTES = 64 << 20  # of all bodies that are read or parsed, without small ones
MAX_VALUES = 1 << 18  # of a body, and so token ids of a request
MAX_CONTAINERS = 1 << 15  # arrays and objects of a body
MAX_FIELDS = 1 << 15  # of all objects of a body
PIECE_BYTES = 1 << 20  # of a body that are looked at while no other thread runs
_MAX_BETWEEN_COMMAS = 256  # digits and spaces; numbers take quadratic time
MAX_NAME = 256  # characters of names and of fields that are ignored
MAX_MESSAGES = 1 << 12  # of a chat, and parts of a message
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_PROMPT_TOKENS = 1 << 20  # of all choices of a request together
MAX_LIVE_PROMPT_TOKENS = 1 << 22  # of all requests in batch and queue
MAX_LOGPROBS_TOLD = 1 << 20  # of all tokens of all choices of a request
PREPARING_THREADS = 8  # that parse and tokenize requests; fewer than the replies' pool has


def max_connections() -> int:
    """Return how many connections are open at once: no more than half of the files that the process
    may open."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def check_structure(raw: bytes) -> None:
    """Refuse a body with more values than the parser takes in a few hundredths of a second
    (ApiError); it may be no JSON."""
    if len(raw) <= SMALL_BODY_BYTES:
        return
    bare = _without_escapes(raw)
    if bare.count(b'"') > 2 * MAX_VALUES:
        raise ApiError(400, f"The body has more than {MAX_VALUES} texts")
    outside = b"".join(bare.split(b'"')[::2])
    for characters, most, what in (
        (b",", MAX_VALUES - 1, f"{MAX_VALUES} values"),
        (b"[{", MAX_CONTAINERS, f"{MAX_CONTAINERS} arrays and objects"),
        (b":", MAX_FIELDS, f"{MAX_FIELDS} fields"),
    ):
        if sum(outside.count(character) for character in characters) > most:
            raise ApiError(400, f"The body has more than {what}")
    if max(map(len, outside.split(b","))) > _MAX_BETWEEN_COMMAS:
        words = f"The body has more than {_MAX_BETWEEN_COMMAS} digits or spaces in a row"
        raise ApiError(400, words)


def _without_escapes(raw: bytes) -> bytes:
    """Return a body without its escaped quotes and backslashes."""
    pieces, start = [], 0
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes is in the next piece
            piece += raw[start + PIECE_BYTES : start + PIECE_BYTES + 1]
        pieces.append(piece.replace(rb"\\", b"").replace(rb"\"", b""))
        start += len(piece)
    return b"".join(pieces)
