"""Servers in this process, a Hub and an object store, whose answers are damaged as a file says."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from huggingface_hub import constants
from huggingface_hub.utils import _http

from fuzz.mutators.values import edit_value, load
from hub_server import HubServer
from mtp_checkpoints.sources import object_store, transfers
from object_server import ObjectServer

NAME, BUCKET = "org/name", "bucket"
Answer = tuple[int, bytes, dict[str, str]]
_STATUSES = (200, 204, 206, 301, 302, 400, 401, 403, 404, 409, 412, 416, 429, 500, 503, 507)
_BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"[" * 100_000,
    b"<html>no</html>",
    b"\xff\xfe\x00",
    b"1e999",
)
_VALUES = ("", "0", "-1", "bytes 0-0/1", "gzip", "x" * 5_000, "\xff", '<a>; rel="next"', "12345")
_PLACES = ("/", "http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/hostname", "//", "::")


@contextmanager
def serving(server: HubServer, answers: Path, environment: dict[str, str]) -> Iterator[None]:
    """Let a server answer this process, damaged; waits between attempts are short."""
    _damage(server, answers)
    with ExitStack() as stack:
        for changed in (
            mock.patch.multiple(transfers, FIRST_WAIT_SECONDS=0.002, MAX_WAIT_SECONDS=0.01),
            mock.patch.object(object_store, "READ_SECONDS", 0.5),
            mock.patch.object(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5),
            mock.patch.object(_http, "time", SimpleNamespace(sleep=lambda _: 0, time=time.time)),
            mock.patch.dict(os.environ, environment),
        ):
            stack.enter_context(changed)
        stack.enter_context(server.running())
        yield


def hub(folder: Path) -> tuple[HubServer, dict[str, str]]:
    """Return a Hub that stores in a folder, and the variables by which it is found."""
    server = _made(HubServer, folder)
    return server, {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": server.token}


def store(folder: Path, source: Path) -> tuple[HubServer, dict[str, str]]:
    """Return an object store with a checkpoint, and the variables by which it is found."""
    server = _made(ObjectServer, folder)
    assert isinstance(server, ObjectServer)
    server.fill(BUCKET, "source", source)
    return server, server.environment("s3")


def pushed(server: HubServer) -> dict[str, bytes]:
    """Return the files of the repository as they are now."""
    repository = server.repositories.get(NAME)
    if repository is None:
        return {}
    files = repository.commits[repository.revisions["main"]]
    return {path: file.read(0, file.size) for path, file in files.items()}


def _made(kind: Callable[[], HubServer], folder: Path) -> HubServer:
    folder.mkdir()
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        return kind()


def _damage(server: HubServer, answers: Path) -> None:
    """Let a server damage the answers that a file names by their numbers."""
    planned = load(answers)
    planned = planned if isinstance(planned, dict) else {}
    numbers, handler = itertools.count(), server.RequestHandlerClass

    class Damaging(handler):  # type: ignore[misc, valid-type]
        def _answer(self, status: int, body: bytes, headers: Any) -> None:
            seed, answer = planned.get(str(next(numbers))), (status, body, dict(headers))
            if isinstance(seed, int):
                random = Random(seed)
                kinds = _KINDS if status != 206 else _OF_RANGES
                answer = random.choice(kinds)(answer, random)
            super()._answer(*answer)

    server.RequestHandlerClass = Damaging


def _edited(answer: Answer, random: Random) -> Answer:
    """Change values of a JSON body."""
    status, body, headers = answer
    try:
        value = json.loads(body)
    except ValueError:
        return _shortened(answer, random)
    if isinstance(value, dict | list) and value:
        edit_value(value, random)
    # A server may well name another host, and the client asks it: not from here.
    edited = re.sub(r"(?<=://)[\d.]+(?=:\d)", "127.0.0.1", json.dumps(value))
    return status, edited.encode(), headers


def _shortened(answer: Answer, random: Random) -> Answer:
    status, body, headers = answer
    return status, body[: random.randrange(len(body) + 1)], headers


def _replaced(answer: Answer, random: Random) -> Answer:
    return answer[0], random.choice(_BODIES), answer[2]


def _other_status(answer: Answer, random: Random) -> Answer:
    return random.choice(_STATUSES), answer[1], answer[2]


def _other_header(answer: Answer, random: Random) -> Answer:
    status, body, headers = answer
    names = [*headers, "Content-Encoding", "Content-Range", "Location", "Link", "ETag"]
    name = random.choice(names)
    if name in headers and random.random() < 0.3:
        del headers[name]
    else:
        headers[name] = random.choice(_PLACES if name == "Location" else _VALUES)
    return status, body, headers


# Bytes of a range that arrive whole and changed are noticed by nobody: there are no checksums.
_OF_RANGES = (_shortened, _other_status, _other_header)
_KINDS = (_edited, _edited, _edited, _replaced, *_OF_RANGES)
